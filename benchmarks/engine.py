"""Steps of the bare engine, without service and pipe: `python -m benchmarks.engine host|sampling|operations|levels`.

host: the cost of a decode step outside the forward pass, which computes nothing: plan, the rest of the run and commit.
On the CPU the run prepares the kernels' inputs and draws greedily from the logits. The GPU's engine has its memory on
the CPU here, and its graphs replay nothing.

sampling: the cost of a step with greedy sampling, with temperature 0.8, with every filter, with every filter, penalty,
bias and log-probabilities, and with temperature 0.8 under a JSON schema, without its compilation. One engine for each
mode; they take turns, in rotating order.
operations: a decode step by operation; native kernels, random weights, 200 tokens of context per row, summed over
layers. --dtype is the arithmetic of products, --stored how their weights lie in memory.
levels: the same steps, and a prompt of 512 tokens, in the kernels of each instruction-set level that this CPU runs. The
least time, as other work on the cores only adds to it.

Other figures are medians. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, get_args

import msgspec
import torch

from app.common.cache_directory import cache_directory
from app.common.ipc import WorkerConfig
from app.engine.cpu.executor import NativeExecutor, ThreadPool
from app.engine.cpu.library import load_library
from app.engine.cpu.packed_decoder import BLOCK
from app.engine.cpu.toolchain.builder import build, find_or_build
from app.engine.cpu.toolchain.cpu_target import LEVELS, runs_here
from app.engine.cpu.toolchain.library_cache import BuildRecipe
from app.engine.execution.engine import Engine
from app.engine.gpu.runner import DeviceRunner
from app.engine.scheduling.batch_plan import BatchPlan, Chunk
from app.engine.scheduling.batch_plan import Sequence as EngineSequence
from app.engine.scheduling.scheduler import StepLimits
from app.engine.startup import build_engine
from app.engine.worker_loop import BuiltEngine
from app.guided.grammar import grammar_from
from benchmarks.common import alternate, command_line, median_of, print_result
from benchmarks.engine_driver import cancel_all, random_prompt, request, run_until_decoding
from benchmarks.gpu.engines import emulated_engine
from benchmarks.shapes import SHAPES, DenseWeights, RandomPacked, parameter_reader
from model.checkpoint.config_file import load_config
from model.config import ModelConfig
from model.files import one_line
from model.nn.transformer import Decoder
from model.number_formats import ITEM_BYTES
from model.presets import preset
from model.quantize import QuantizedKind

T = TypeVar("T")
KERNELS = ("native", "torch")
STORED = ("float32", "bfloat16", *get_args(QuantizedKind))
"""Weights of `operations` and `levels`."""
CONTEXT_TOKENS = 200
LEVEL_STEPS = ("1 rows", "8 rows", "32 rows", "prompt")
_FILTERS: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "typical_p": 0.95, "top_p": 0.95, "min_p": 0.02}
SAMPLING_MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "filters": _FILTERS,
    "everything": {
        **_FILTERS,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.2,
        "logit_bias": tuple((token, -1.0) for token in range(100, 110)),
        "logprobs": 5,
    },
    "guided": {"temperature": 0.8},
}
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
"""Longer than the output, so that all modes sample equally many tokens."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = command_line("engine", __doc__)
    parser.add_argument("--weights", type=Path, default=Path("weights"), help="weights directory (%(default)s)")
    parser.add_argument("--kernels", choices=KERNELS, default="native", help="kernels (%(default)s)")
    what = parser.add_subparsers(required=True, metavar="host|sampling|operations|levels")
    what.add_parser("host").set_defaults(measure=_host)
    one = what.add_parser("sampling")
    one.set_defaults(measure=_sampling)
    one.add_argument("--quick", action="store_true", help="few steps, as a smoke test")
    for verb, measure, times in (("operations", _operations, "steps"), ("levels", _levels, "rounds")):
        one = what.add_parser(verb)
        one.set_defaults(measure=measure)
        one.add_argument(
            "--shape", choices=("weights", *SHAPES), default="weights", help="decoder's shape: --weights', or another"
        )
        one.add_argument("--dtype", choices=ITEM_BYTES, default="bfloat16", help="arithmetic (%(default)s)")
        one.add_argument("--stored", choices=STORED, default="bfloat16", help="weights (%(default)s)")
        default = 100 if times == "steps" else 5
        one.add_argument(f"--{times}", type=int, default=default, help="how many are measured (%(default)s)")
    one.add_argument("--cache-dir", type=Path, metavar="DIR", help="directory of the libraries; missing ones are built")
    flags = vars(parser.parse_args(argv))
    measure = flags.pop("measure")
    try:
        result = measure(**flags)
    except ValueError as error:  # of weights or compiler; the message names which
        parser.exit(2, one_line(f"error: {error}") + "\n")
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}
    environment = {"torch": str(torch.__version__), "threads": torch.get_num_threads()}
    print_result(measure.__name__.removeprefix("_"), **environment, **settings, **result)
    return 0


def _engine(weights: Path, kernels: str, *, rows: int, length: int) -> BuiltEngine:
    """An engine as the service builds it, that prefills all its rows in one step."""
    least_blocks = -(-load_config(weights).context // BLOCK)
    return build_engine(
        WorkerConfig(
            weights=str(weights),
            kernels="native" if kernels == "native" else "torch",
            speculate="off",
            library=str(find_or_build(None)) if kernels == "native" else None,
            max_running=rows,
            tokens_per_step=max(256, rows * length),
            kv_blocks=max(least_blocks, rows * (-(-length // BLOCK) + 1)),
        ),
    )


def _host(weights: Path, kernels: str) -> dict[str, Any]:
    del kernels
    steps, times = 150, []
    for device, make_engine in (("cpu", partial(_cpu_host_engine, weights)), ("gpu", _gpu_host_engine)):
        print(f"{device} {'rows':>5}{'plan':>10}{'run':>10}{'commit':>10}{'step':>10}{'CPU time':>10}  us, median")
        for rows in (1, 8, 32, 256):
            us = _time_host(make_engine(rows), rows, steps)
            print(f"{rows:9}" + "".join(f"{value:10.1f}" for value in us.values()), flush=True)
            times.append({"device": device, "rows": rows, **us})
    return {"steps": steps, "times": times}


def _cpu_host_engine(weights: Path, rows: int) -> Engine:
    """The engine of the service, with native kernels that compute nothing."""
    built = _engine(weights, "native", rows=rows, length=CONTEXT_TOKENS)
    runner: Any = built.engine.runner
    runner.executor._library = SimpleNamespace(ink_run=lambda *_: None, ink_head=lambda *_: None)
    runner.executor._logits = torch.randn(rows, built.ready.vocab_size).numpy()
    return built.engine


def _gpu_host_engine(rows: int) -> Engine:
    """The engine of a GPU with its memory on the CPU, and with graphs that replay nothing."""
    decoder, limits = Decoder(preset("nano")).requires_grad_(False), StepLimits(tokens_per_step=512, max_running=rows)
    engine = emulated_engine(decoder, limits, blocks=8 * rows, block_size=64, capture=lambda _work: lambda: None)
    assert isinstance(engine.runner, DeviceRunner)
    engine.runner.graphs.executor.out.numbers_X.zero_()
    return engine


def _time_host(engine: Engine, rows: int, steps: int) -> dict[str, float]:
    """Median microseconds of a decode step and of its parts; CPU time is that of the engine's thread."""
    for row in range(rows):
        engine.add(request(f"{row}", random_prompt(20, 256, row), steps + 40))
    run_until_decoding(engine, rows)
    seconds = dict.fromkeys(("plan", "run", "commit", "step", "cpu"), 0.0)
    parts: Any = {
        "plan": (engine.scheduler, ("plan", "plan_ahead", "mark_launched")),
        "run": (engine.isolation, ("launch", "run")),
        "commit": (engine.scheduler, ("commit",)),
        "step": (engine, ("step",)),
    }
    for part, (owner, names) in parts.items():
        for name in names:
            vars(owner)[name] = _clocked(getattr(owner, name), seconds, part)
    if isinstance(engine.runner, DeviceRunner):
        vars(engine.runner)["collect"] = _clocked(engine.runner.collect, seconds, "run")
    samples = []
    for _ in range(steps):
        seconds |= dict.fromkeys(seconds, 0.0)
        start = time.thread_time()
        engine.step()
        samples.append(seconds | {"cpu": time.thread_time() - start})
    return {name: statistics.median(each[name] for each in samples) * 1e6 for name in seconds}


def _clocked(work: Callable[..., T], seconds: dict[str, float], part: str) -> Callable[..., T]:
    """Adds how long each call of `work` takes."""

    def run(*args: Any) -> T:
        start = time.perf_counter()
        result = work(*args)
        seconds[part] += time.perf_counter() - start
        return result

    return run


def _sampling(weights: Path, kernels: str, quick: bool) -> dict[str, Any]:
    prompt, rounds, steps = (20, 1, 3) if quick else (CONTEXT_TOKENS, 7, 30)
    modes = [mode for mode in SAMPLING_MODES if mode != "guided" or find_spec("llguidance")]
    print(f"{'rows':>5}" + "".join(f"{mode:>12}" for mode in modes) + "  ms a step")
    times = []
    for rows in (1, 3) if quick else (1, 8, 32):
        built = {mode: _engine(weights, kernels, rows=rows, length=prompt + steps + 3) for mode in modes}
        rng = random.Random(rows)
        medians = [_sampling_round(built, rows, prompt, steps, rng) for _ in range(rounds)]
        ms = {f"{mode}_ms": median_of(medians, mode) for mode in modes}
        percent = {f"{m}_percent": 100 * (median_of(medians, m, by="greedy") - 1) for m in modes[1:]}
        print(f"{rows:5}" + "".join(f"{value:12.3f}" for value in ms.values()))
        print(f"{'':17}" + "".join(f"{value:+10.1f} %" for value in percent.values()), flush=True)
        times.append({"rows": rows, **ms, **percent})
    return {"prompt": prompt, "rounds": rounds, "steps": steps, "times": times}


def _sampling_round(
    built: dict[str, BuiltEngine], rows: int, prompt: int, steps: int, rng: random.Random
) -> dict[str, float]:
    """Median milliseconds of a step, by mode; all modes continue the same new prompts."""
    seed, engines = rng.random(), {mode: each.engine for mode, each in built.items()}
    grammar = grammar_from("json_schema", _SCHEMA)
    assert grammar
    for mode, engine in engines.items():
        vocab_size, tracker = built[mode].ready.vocab_size, built[mode].grammars
        for row in range(rows):
            tokens = random_prompt(prompt, vocab_size, f"{seed} {row}")
            one = request(f"{row}", tokens, steps + 3, seed=row, **SAMPLING_MODES[mode])
            if mode == "guided":
                assert tracker
                one = msgspec.structs.replace(one, grammar=grammar.lark)
                compilation = tracker.prepare(one)
                while not compilation.done:
                    time.sleep(0.0005)
            engine.add(one)
        run_until_decoding(engine, rows)
    milliseconds: dict[str, list[float]] = {mode: [] for mode in engines}
    for _ in range(steps):
        for mode in rng.sample(list(engines), len(engines)):
            start, n_events = time.perf_counter(), 0
            while not n_events:
                n_events = len(engines[mode].step().events)
            assert n_events == rows or mode == "guided", "a step did not continue every sequence"
            # A row whose masks have cost too much sits out a step.
            milliseconds[mode].append((time.perf_counter() - start) * 1000 * rows / n_events)
    for engine in engines.values():
        cancel_all(engine)
    return {mode: statistics.median(values) for mode, values in milliseconds.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Microseconds of one step by kind of operation, summed over all layers."""

    rows: int
    step_us: float
    head_us: float
    operations_us: dict[str, float]


def _operations(weights: Path, kernels: str, shape: str, dtype: str, stored: str, steps: int) -> dict[str, Any]:
    del kernels
    profiles = profile(_config(weights, shape), steps=steps, dtype=dtype, stored=stored)
    print(f"{'us a step':16}" + "".join(f"{f'{each.rows} rows':>12}" for each in profiles))
    for name in profiles[0].operations_us:
        print(f"{name:16}" + "".join(f"{each.operations_us[name]:12.1f}" for each in profiles))
    print(f"{'head':16}" + "".join(f"{each.head_us:12.1f}" for each in profiles))
    print(f"{'all':16}" + "".join(f"{each.step_us:12.1f}" for each in profiles))
    return {"profiles": profiles}


class DecodeSteps:
    """Steps of a decoder with random weights of bfloat16, in the kernels of one library on some threads."""

    def __init__(
        self,
        config: ModelConfig,
        library: Path,
        *,
        threads: int,
        dtype: str = "bfloat16",
        stored: str = "bfloat16",
        rows: int = 32,
    ) -> None:
        """dtype: in which products compute. stored: one of STORED. Raises ValueError if no product has both."""
        if (dtype, stored) == ("bfloat16", "float32"):
            raise ValueError("weights in float32 are computed in float32: give --dtype float32")
        decoder = Decoder(config).initialize(0).to(torch.bfloat16).requires_grad_(False)
        kind: QuantizedKind | None = "int4" if stored == "int4" else "int8" if stored == "int8" else None
        loaded, self._length = load_library(library), min(CONTEXT_TOKENS, config.context - 1)
        blocks, read = max(rows * (self._length // BLOCK + 1), -(-config.context // BLOCK)), parameter_reader(decoder)
        pool = ThreadPool(loaded, threads)
        self._executor = NativeExecutor(
            loaded,
            config,
            RandomPacked(config, kind, read) if kind else DenseWeights(read),
            pool,
            dtype=dtype,
            blocks=blocks,
            stored_format=lambda _name, computed: computed if kind else stored,
        )
        self._config, self.names = config, self._executor.decoder.names

    def step(self, rows: int) -> tuple[float, float, array[float]]:
        """Seconds of a decode step of `rows` sequences, of its head, and of each operation before it."""
        length = self._length
        return self._time([Chunk(self._sequence(row, length), length, length + 1) for row in range(rows)])

    def prefill(self, tokens: int) -> float:
        """Seconds of a step with a prompt of `tokens` tokens."""
        return self._time([Chunk(self._sequence(0, tokens), 0, tokens)])[0]

    def _sequence(self, row: int, length: int) -> EngineSequence:
        n_blocks, n_groups = length // BLOCK + 1, len(self._executor.decoder.groups)
        one = request(str(row), random_prompt(length + 1, self._config.vocab_size, row), 1)
        blocks = array("i", range(row * n_blocks, (row + 1) * n_blocks))
        return EngineSequence(request=one, tokens=array("q", one.prompt), arrival=row, blocks=(blocks,) * n_groups)

    def _time(self, chunks: Sequence[Chunk]) -> tuple[float, float, array[float]]:
        seconds = self._executor.seconds = array("d", bytes(8 * len(self.names)))
        plan, last_rows = BatchPlan(tuple(chunks)), list(accumulate(chunk.stop - chunk.start for chunk in chunks))
        began = time.perf_counter()
        self._executor.run(plan)
        ran = time.perf_counter()
        self._executor.logits([row - 1 for row in last_rows])
        done = time.perf_counter()
        return done - began, done - ran, seconds


def profile(
    config: ModelConfig,
    *,
    steps: int,
    dtype: str = "bfloat16",
    stored: str = "bfloat16",
    rows: Sequence[int] = (1, 8, 32),
) -> list[Profile]:
    """Measures each operation. dtype, stored: see DecodeSteps."""
    how: dict[str, Any] = {"threads": torch.get_num_threads(), "dtype": dtype, "stored": stored}
    decode, profiles = DecodeSteps(config, find_or_build(), rows=max(rows), **how), []
    for n_rows in rows:
        step, head, operations = zip(*[decode.step(n_rows) for _ in range(steps)], strict=True)
        by_name = dict.fromkeys(decode.names, 0.0)
        for name, seconds in zip(decode.names, zip(*operations, strict=True), strict=True):
            by_name[name] += statistics.median(seconds) * 1e6
        step_us, head_us = statistics.median(step) * 1e6, statistics.median(head) * 1e6
        profiles.append(Profile(rows=n_rows, step_us=step_us, head_us=head_us, operations_us=by_name))
    return profiles


def _config(weights: Path, shape: str) -> ModelConfig:
    return load_config(weights) if shape == "weights" else SHAPES[shape]


def _levels(
    weights: Path, kernels: str, shape: str, dtype: str, stored: str, rounds: int, cache_dir: Path | None
) -> dict[str, Any]:
    """Least milliseconds of steps by level; the levels take turns."""
    del kernels
    config = _config(weights, shape)
    how: dict[str, Any] = {"threads": torch.get_num_threads(), "dtype": dtype, "stored": stored}
    prompt, levels = min(512, config.context), [level for level in LEVELS if runs_here(level)]
    folder = cache_directory(cache_dir)
    assert folder, "no home directory: give --cache-dir"
    libraries = {level.name: build(BuildRecipe(level=level), folder) for level in levels}
    by_level = {name: DecodeSteps(config, file, **how) for name, file in libraries.items()}
    ways = {
        f"{what} {name}": partial(_least, take, times)
        for name, steps in by_level.items()
        for what, take, times in (
            *((f"{rows} rows", lambda steps=steps, rows=rows: steps.step(rows)[0], 20) for rows in (1, 8, 32)),
            ("prompt", lambda steps=steps: steps.prefill(prompt), 3),
        )
    }
    results = alternate(ways, rounds)
    ms = {way: min(result[way] for result in results) * 1000 for way in ways}
    print(f"{'least ms':12}" + "".join(f"{name:>12}" for name in by_level))
    for what in LEVEL_STEPS:
        print(f"{what:12}" + "".join(f"{ms[f'{what} {name}']:12.3f}" for name in by_level))
    return {"prompt": prompt, "least_ms": ms}


def _least(take: Callable[[], float], times: int) -> float:
    return min(take() for _ in range(times))


if __name__ == "__main__":
    sys.exit(main())
