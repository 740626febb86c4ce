"""granitemoe, granitemoeshared: granite with experts everywhere, maybe with a shared one, which every token passes."""

from __future__ import annotations

from model.config import Count, ModelConfig, check_value
from model.families.granite import MOE_FUSED, MOE_NAMES, granite_experts, read_granite
from model.families.llama import llama_family, read_sizes
from model.families.rope import read_whole_rope
from model.families.spec import Raw


def _read(raw: Raw) -> ModelConfig:
    return read_granite(raw, read_sizes(raw), granite_experts(raw, read_whole_rope(raw), shared_width=0))


def _read_shared(raw: Raw) -> ModelConfig:
    shared = raw.get("shared_intermediate_size", 0)
    check_value(shared, Count, "shared_intermediate_size")
    return read_granite(raw, read_sizes(raw), granite_experts(raw, read_whole_rope(raw), shared_width=shared))


GRANITE_MOE = llama_family(
    name="granitemoe",
    models="Granite 3 1B-A400M and 3B-A800M",
    architecture="GraniteMoeForCausalLM",
    read=_read,
    names=MOE_NAMES,
    fused=MOE_FUSED,
)
GRANITE_MOE_SHARED = llama_family(
    name="granitemoeshared",
    models="Granite with experts and a shared expert",
    architecture="GraniteMoeSharedForCausalLM",
    read=_read_shared,
    names=MOE_NAMES,
    fused=MOE_FUSED,
)
