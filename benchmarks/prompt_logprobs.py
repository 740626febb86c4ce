"""Cost of the log-probabilities of a long prompt: `python -m benchmarks.prompt_logprobs`. Linux, on the CPU.

While eight streams run, a prompt of 1,000 tokens (or as many as fit the context) arrives, with the 20 most likely
tokens for each of its positions and without. Each measurement is a fresh process with an engine and no pipe:

1. How much memory does the engine need beyond what it had before the prompt?
2. How many steps, and how long, does a stream wait for its next token at most?

Two models: the default weights, and random weights with GPT-2's vocabulary. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch

from app.common.types import Request, SamplingParams, StepReport
from app.engine.execution.engine import Engine
from benchmarks.in_process_engine import KERNELS, blocks_for, build_in_process_engine
from benchmarks.machine_info import Machine, this_machine
from model.checkpoint.checkpoint import load
from model.command_line import OneLineParser
from model.device import choose_dtype
from model.nn.transformer import Decoder
from model.presets import preset

_WEIGHTS = Path(__file__).parent.parent / "weights"
_MODELS = ("default weights", "random, vocabulary 50257")
_STREAMS, _PROMPT, _TOP, _BLOCK, _TOKENS_PER_STEP = 8, 1000, 20, 16, 256
_LEAD_IN = 20
"""Steps of the streams alone, before the prompt arrives and after it is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRun:
    """One prompt concurrent with eight streams, in one process."""

    prompt_tokens: int
    dtype: str
    steps: int
    """Steps until the prompt's first token."""
    prompt_ms: float
    growth_mib: float
    """Peak memory while the prompt is processed, beyond that before it."""
    longest_gap_steps: int
    longest_gap_ms: float
    longest_step_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """One model without and with log-probabilities; medians over the repeats."""

    model: str
    plain: PromptRun
    scored: PromptRun

    @property
    def added_mib(self) -> float:
        """Memory that the log-probabilities need."""
        return round(self.scored.growth_mib - self.plain.growth_mib, 1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.prompt_logprobs", description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--repeats", type=int, default=3, help="processes per figure (%(default)s)")
    parser.add_argument("--only", choices=_MODELS, help="measure only this model")
    parser.add_argument("--child", choices=("plain", "scored"), help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    if flags.child:
        run = measure(flags.only, torch_dtype(flags.dtype), scored=flags.child == "scored")
        print(msgspec.json.encode(run).decode())
        return 0
    rows = []
    print(f"{'model':>24}  {'prompt':>6}  {'added MiB':>9}  {'gap, steps':>10}  {'gap, ms':>15}  {'prompt, ms':>15}")
    for model in [flags.only] if flags.only else _MODELS:
        plain, scored = (_medians(model, flags.dtype, kind, flags.repeats) for kind in ("plain", "scored"))
        row = ModelRow(model=model, plain=plain, scored=scored)
        print(
            f"{model:>24}  {plain.prompt_tokens:6}  {row.added_mib:9.1f}  "
            f"{plain.longest_gap_steps:4} -> {scored.longest_gap_steps:2}  "
            f"{plain.longest_gap_ms:5.0f} -> {scored.longest_gap_ms:6.0f}  "
            f"{plain.prompt_ms:5.0f} -> {scored.prompt_ms:6.0f}",
            flush=True,
        )
        rows.append(msgspec.to_builtins(row) | {"added_mib": row.added_mib})
    print(msgspec.json.encode({"benchmark": "prompt_logprobs", **_environment(), "rows": rows}).decode(), flush=True)
    return 0


def measure(model: str, dtype: torch.dtype, *, scored: bool) -> PromptRun:
    """Measures in this process. Call it once, since memory that a run has taken stays with the process."""
    decoder = _decoder(model, dtype)
    engine, vocab, context = _engine(decoder), decoder.config.vocab_size, decoder.config.context
    generator = torch.Generator().manual_seed(0)
    for i in range(_STREAMS):
        prompt = tuple(torch.randint(vocab, (_BLOCK,), generator=generator).tolist())
        engine.add(Request(id=f"stream {i}", prompt=prompt, max_tokens=context - _BLOCK, params=SamplingParams(seed=i)))
    _steps(engine, _LEAD_IN)
    tokens = tuple(torch.randint(vocab, (min(_PROMPT, context - 1),), generator=generator).tolist())
    before_mib = _reset_peak_mib()
    engine.add(Request(id="prompt", prompt=tokens, max_tokens=1, prompt_logprobs=_TOP if scored else None))
    during = _steps(engine, 0, until="prompt")
    growth_mib = _status_mib("VmHWM") - before_mib
    after = _steps(engine, _LEAD_IN)
    gaps = [_gaps(f"stream {i}", [*during, *after]) for i in range(_STREAMS)]
    assert sum(len(s.tokens) for _, report in during for s in report.scores) == (len(tokens) - 1) * scored
    return PromptRun(
        prompt_tokens=len(tokens),
        dtype=str(dtype).removeprefix("torch."),
        steps=len(during),
        prompt_ms=sum(ms for ms, _ in during),
        growth_mib=growth_mib,
        longest_gap_steps=max(steps for steps, _ in gaps),
        longest_gap_ms=max(ms for _, ms in gaps),
        longest_step_ms=max(ms for ms, _ in during),
    )


def torch_dtype(name: str) -> torch.dtype:
    """The number format that the service would choose."""
    return choose_dtype(name, torch.device("cpu"))


def _decoder(model: str, dtype: torch.dtype) -> Decoder:
    if model == _MODELS[0]:
        return load(_WEIGHTS, device=torch.device("cpu"), dtype=dtype).decoder
    config = dataclasses.replace(preset("base"), vocab_size=50257)
    return Decoder(config).initialize(0).to(dtype).requires_grad_(False).eval()


def _engine(decoder: Decoder) -> Engine:
    """An engine as the worker builds it, with blocks for all requests."""
    blocks = blocks_for(_STREAMS + 1, decoder.config.context)
    return build_in_process_engine(
        decoder, kernels=KERNELS[0], blocks=blocks, tokens_per_step=_TOKENS_PER_STEP, max_running=32
    )


def _steps(engine: Engine, count: int, *, until: str | None = None) -> list[tuple[float, StepReport]]:
    """Runs `count` steps, or until a request has ended: (milliseconds, report). Encodes each report as for the pipe."""
    done: list[tuple[float, StepReport]] = []
    ended = False
    while not ended if until else len(done) < count:
        start = time.perf_counter()
        report = engine.step()
        msgspec.msgpack.encode(report)
        done.append(((time.perf_counter() - start) * 1000, report))
        ended = any(event.request_id == until and event.finish for event in report.events)
    return done


def _gaps(stream: str, steps: Sequence[tuple[float, StepReport]]) -> tuple[int, float]:
    """Most steps and most milliseconds between two tokens of a stream."""
    longest, count, ms, waited = 0, 0, 0.0, 0.0
    for step_ms, report in steps:
        count, waited = count + 1, waited + step_ms
        if any(event.request_id == stream for event in report.events):
            longest, ms, count, waited = max(longest, count), max(ms, waited), 0, 0.0
    return longest, ms


def _reset_peak_mib() -> float:
    """Resets the peak to the current memory, and returns that."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_mib("VmRSS")


def _status_mib(name: str) -> float:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) / 1024


def _medians(model: str, dtype: str, kind: str, repeats: int) -> PromptRun:
    """Medians over fresh processes."""
    command = [sys.executable, "-m", "benchmarks.prompt_logprobs", "--only", model, "--dtype", dtype, "--child", kind]
    runs = []
    for _ in range(repeats):
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        runs.append(msgspec.json.decode(out, type=PromptRun))
    names = ("prompt_ms", "growth_mib", "longest_gap_ms", "longest_step_ms")
    figures = {name: round(statistics.median(getattr(run, name) for run in runs), 1) for name in names}
    most_steps = max(run.longest_gap_steps for run in runs)
    return dataclasses.replace(runs[0], longest_gap_steps=most_steps, **figures)


def _environment() -> dict[str, object]:
    machine: Machine = this_machine()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": msgspec.to_builtins(machine),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    sys.exit(main())
