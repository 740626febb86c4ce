"""Compares every kernel with a reference in higher precision: the checks in conformance/, on large shapes."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.gpu.conformance.attention import check_attention
from benchmarks.gpu.conformance.experts import check_experts
from benchmarks.gpu.conformance.packed import check_packed_products
from benchmarks.gpu.conformance.rows import check_add_norm, check_gate, check_split_heads, check_states
from benchmarks.gpu.conformance.sampler import check_samplers
from benchmarks.gpu.packages import missing
from benchmarks.gpu.results import Finding, StageContext, Unsupported, shortened

CHECKS = (
    check_attention,
    check_add_norm,
    check_gate,
    check_split_heads,
    check_states,
    check_experts,
    check_packed_products,
    check_samplers,
)
"""Called with a device and whether sizes are tiny; each yields a finding for each comparison."""
_MAX_VIOLATIONS = 10
"""Reported violations per check."""


def conform(context: StageContext) -> Iterator[Finding]:
    """Runs all checks; one that raises has failed, and the rest goes on.

    Reports each violation, then how many comparisons hold, and the largest values: 0.8 of what is allowed.
    """
    if context.device == "cuda" and missing(("triton",)):
        raise Unsupported("needs triton")
    for check in CHECKS:
        what, n_held, n_broken, note, worst = check.__name__.removeprefix("check_"), 0, 0, "", dict[str, float]()
        try:
            for found in check(device=context.device, tiny=context.tiny):
                n_held, n_broken = n_held + (found.ok is not False), n_broken + (found.ok is False)
                if found.ok is False and n_broken <= _MAX_VIOLATIONS:
                    yield replace(found, what=f"{what}, {found.what}")
                if not isinstance(found.value, str):
                    worst[found.unit] = max(worst.get(found.unit, float("-inf")), found.value)
        except Exception as error:  # whatever a kernel raises is a failure of its own
            traceback.print_exc()
            note = f"then {type(error).__name__}: {shortened(str(error))}"
        most = sorted(worst.items(), key=lambda pair: -pair[1])[:2]
        yield Finding(
            what=what,
            value=n_held,
            unit=f"of {n_held + n_broken} comparisons hold",
            ok=not n_broken and not note,
            note=note or ", ".join(f"{value:.3g} {unit}" for unit, value in most),
        )
