"""Cost of a JSON schema: tokens per second of the engine without and with one, `python -m benchmarks.guided`.

The engine runs in this process, without service and pipe. Runs with and without the schema alternate, so that a slow
moment of the machine affects both; figures are medians. Compiling the schema, which in the service delays only its own
request, is reported separately. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from app.common.types import Request, SamplingParams
from app.common.types import Sequence as EngineSequence
from app.engine.execution.engine import Engine
from app.engine.guided.grammar_tracker import GrammarTracker
from app.engine.sampling.sampler_io import SampledToken
from app.guided.grammar import grammar_from
from benchmarks.in_process_engine import KERNELS, blocks_for, build_in_process_engine
from benchmarks.machine_info import Machine, this_machine
from model.checkpoint.checkpoint import load
from model.command_line import OneLineParser
from model.device import choose_dtype
from model.files import one_line
from model.tokenizer.tokenizer import Tokenizer

_BLOCK = 16
_PROMPT = "Once upon a time there was"
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["merry", "sad", "asleep"]},
        "friends": {"type": "array", "items": {"type": "string", "pattern": "^[A-Z][a-z]{2,12}$"}, "maxItems": 4},
    },
    "required": ["name", "age", "mood", "friends"],
    "additionalProperties": False,
}
_SCHEMA = {"type": "array", "items": _PERSON, "minItems": 100}
"""Longer than the output, so that both runs sample equally many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedResult:
    """The whole result."""

    date: str
    machine: Machine
    torch: str
    threads: int
    weights: str
    kernels: str
    streams: int
    max_tokens: int
    repeats: int
    compile_ms: float
    free_tokens_per_second: float
    guided_tokens_per_second: float
    cost_percent: float
    """Median over the pairs."""
    guides_ms_per_step: float
    """Time in app/engine/guided/grammar_tracker.py per step of all streams, including waits for masks."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.guided", description=__doc__.partition("\n")[0])
    parser.add_argument("--weights", type=Path, default=Path("weights"), help="weights directory (%(default)s)")
    parser.add_argument("--kernels", choices=KERNELS, default="native", help="kernels (%(default)s)")
    parser.add_argument("--streams", type=int, default=8, help="concurrent requests (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens per request (%(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="pairs of runs (%(default)s)")
    flags = parser.parse_args(argv)
    try:
        result = measure(
            flags.weights,
            kernels=flags.kernels,
            streams=flags.streams,
            max_tokens=flags.max_tokens,
            repeats=flags.repeats,
        )
    except ValueError as error:  # of weights or compiler; the message names which
        parser.exit(2, one_line(f"error: {error}") + "\n")
    print(msgspec.json.encode({"benchmark": "guided", **msgspec.to_builtins(result)}).decode(), flush=True)
    return 0


def measure(weights: Path, *, kernels: str, streams: int, max_tokens: int, repeats: int) -> GuidedResult:
    """Measures and prints each pair of runs."""
    tokenizer = Tokenizer.load(weights)
    guide = grammar_from("json_schema", _SCHEMA)
    assert guide
    tracker = _TimedGrammarTracker(tokenizer, streams)
    engine = _engine(weights, tracker, streams, max_tokens, kernels)
    prompt = tuple(tokenizer.encode(_PROMPT))
    pairs, compiled, per_step = [], [], []
    print(f"{'free':>10}  {'guided':>10}  tokens/s")
    for number in range(1 + repeats):
        unguided = _tokens_per_second(engine, _requests(prompt, "", streams, max_tokens))
        requests = _requests(prompt, guide.lark, streams, max_tokens)
        started = time.perf_counter()
        for compilation in [tracker.prepare(request) for request in requests]:
            while not compilation.done:
                time.sleep(0.0005)
        compiled.append((time.perf_counter() - started) * 1e3 / streams)
        tracker.seconds = 0.0
        guided = _tokens_per_second(engine, requests)
        if number:  # the first pair is the warm-up
            pairs.append((unguided, guided))
            per_step.append(tracker.seconds * 1e3 / max_tokens)
            print(f"{unguided:10.1f}  {guided:10.1f}", flush=True)
    return GuidedResult(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=this_machine(),
        torch=str(torch.__version__),
        threads=torch.get_num_threads(),
        weights=str(weights),
        kernels=kernels,
        streams=streams,
        max_tokens=max_tokens,
        repeats=repeats,
        compile_ms=statistics.median(compiled),
        free_tokens_per_second=statistics.median(unguided for unguided, _ in pairs),
        guided_tokens_per_second=statistics.median(guided for _, guided in pairs),
        cost_percent=statistics.median((1 - guided / unguided) * 100 for unguided, guided in pairs),
        guides_ms_per_step=statistics.median(per_step),
    )


class _TimedGrammarTracker(GrammarTracker):
    """A GrammarTracker that measures its own time."""

    def __init__(self, tokenizer: Tokenizer, streams: int) -> None:
        super().__init__(lambda: tokenizer.bytes_of, vocab_size=tokenizer.vocab_size, max_states=streams)
        self.seconds = 0.0

    def allowed(self, sequences: Sequence[EngineSequence]) -> list[Tensor | SampledToken | None]:
        started = time.perf_counter()
        result = super().allowed(sequences)
        self.seconds += time.perf_counter() - started
        return result

    def accept_tokens(self, sequences: Sequence[EngineSequence], sampled: Sequence[SampledToken]) -> list[SampledToken]:
        started = time.perf_counter()
        result = super().accept_tokens(sequences, sampled)
        self.seconds += time.perf_counter() - started
        return result


def _engine(weights: Path, tracker: GrammarTracker, streams: int, max_tokens: int, kernels: str) -> Engine:
    device = torch.device("cpu")
    decoder = load(weights, device=device, dtype=choose_dtype("auto", device)).decoder
    return build_in_process_engine(
        decoder,
        kernels=kernels,
        blocks=blocks_for(streams, max_tokens + 4 * _BLOCK),
        tokens_per_step=max(256, streams),
        max_running=streams,
        grammar_tracker=tracker,
    )


def _requests(prompt: tuple[int, ...], guide: str, streams: int, max_tokens: int) -> list[Request]:
    params = [SamplingParams(temperature=0.8, seed=i) for i in range(streams)]
    return [
        Request(id=f"{i}", prompt=prompt, max_tokens=max_tokens, params=params[i], grammar=guide)
        for i in range(streams)
    ]


def _tokens_per_second(engine: Engine, requests: Sequence[Request]) -> float:
    for request in requests:
        engine.add(request)
    tokens, started = 0, time.perf_counter()
    while engine.has_work:
        report = engine.step()
        assert not report.failed, report.failed
        tokens += sum(event.token is not None for event in report.events)
    assert tokens == sum(request.max_tokens for request in requests)
    return tokens / (time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
