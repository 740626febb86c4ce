"""Training here against a plain PyTorch loop and transformers.Trainer, one shape: `python -m benchmarks.train`.

The same tokens from memory, the same windows a step, threads and number format; each has the micro-batch that is asked
for. Steps alternate, so that a slow moment of the machine meets both; the first of each is not counted, the optimisers
are (ours Muon and AdamW, the others' AdamW). The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch

from benchmarks.result import this_machine
from benchmarks.train.plain import PlainLoop
from model.command_line import OneLineParser
from model.device import choose_device, choose_dtype
from model.nn.transformer import Decoder
from model.presets import preset
from model.train.common.thread_pool import keep_freed_memory
from model.train.data.batch import of_windows
from model.train.step.distributed import ProcessGroup
from model.train.step.loss_backend import computing_for
from model.train.step.objective import Objective
from model.train.step.optimizer import ParameterUpdates
from model.train.step.trainer import Trainer


def main(argv: Sequence[str] | None = None) -> int:
    p = OneLineParser(prog="python -m benchmarks.train", description=__doc__.partition("\n")[0])
    p.add_argument("--preset", choices=("nano", "small", "base"), default="small", help="the shape (%(default)s)")
    p.add_argument("--rounds", type=int, default=5, help="steps of each that count (%(default)s)")
    p.add_argument("--windows", type=int, default=16, help="of a step (%(default)s)")
    p.add_argument("--micro-windows", type=int, default=4, help="of them at once (%(default)s)")
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = p.parse_args(argv)
    if min(options.rounds, options.windows, options.micro_windows) < 1:
        p.error("--rounds, --windows and --micro-windows must be at least 1")
    if options.windows % options.micro_windows:
        p.error("--windows must be a multiple of --micro-windows")
    device = choose_device(options.device)
    dtype = choose_dtype("auto", device)
    rounds = _rounds(options, device, dtype)
    n_tokens = options.windows * preset(options.preset).context
    rates, per_cpu_second = ([found[i] for found in rounds] for i in range(2))
    result = {"tokens_per_second": _rates(n_tokens, rates), "tokens_per_cpu_second": _rates(n_tokens, per_cpu_second)}
    times = {"times": _times(rates), "times_by_cpu": _times(per_cpu_second)}
    for name, rate in result["tokens_per_second"].items():
        print(f"{name:8} {rate:8.0f} tokens/s, {result['tokens_per_cpu_second'][name]:8.0f} a CPU second")
    for name, ratio in times["times"].items():
        by_cpu = times["times_by_cpu"][name]
        print(f"ours is {ratio:.2f} times {name}, {by_cpu:.2f} by CPU time (medians of {options.rounds} rounds)")
    if _missing():
        print(f"not measured: transformers.Trainer, which needs {_missing()} (pip install 'inkstream[bench]')")
    facts = {
        "benchmark": "train",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": this_machine(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        **vars(options),
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
    }
    print(msgspec.json.encode(facts | result | times).decode(), flush=True)
    return 0


def _rounds(
    options: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Seconds of a step of each by the wall, and of all cores; in turn."""
    config, generator = preset(options.preset), torch.Generator().manual_seed(1)
    windows_BN = torch.randint(config.vocab_size, (options.windows, config.context + 1), generator=generator)
    batch = of_windows(windows_BN)
    decoder = Decoder(config).initialise(1).to(device)
    optimiser = ParameterUpdates(decoder, "muon", matrix_lr=0.02, other_lr=0.004, weight_decay=0.05)
    objective = Objective(decoder, device, dtype, computing_for("auto", device.type))
    at_once = options.micro_windows
    learner = Trainer(objective, optimiser, ema=0.0, ranks=ProcessGroup(), micro_windows=at_once)
    plain = PlainLoop(config, device, dtype, at_once)

    def ours() -> None:
        learner.gradients(batch)
        learner.update(0, 1.0)

    others: dict[str, Callable[[], object]] = {
        "ours": ours,
        "plain": lambda: plain.step(batch.inputs_RN, batch.targets_RN),
    }
    keep_freed_memory()  # the others profit too
    rounds: list[tuple[dict[str, float], dict[str, float]]] = []

    def turn(**trainer: tuple[float, float]) -> None:
        took = {name: _seconds(way, device) for name, way in others.items()} | trainer
        rounds.append(
            ({name: wall for name, (wall, _) in took.items()}, {name: cpu for name, (_, cpu) in took.items()})
        )

    if _missing():
        for _ in range(1 + options.rounds):
            turn()
    else:
        hugging = importlib.import_module("benchmarks.train.hugging")
        with TemporaryDirectory() as folder:
            asked: dict[str, Any] = {
                "at_once": at_once,
                "steps": 1 + options.rounds,
                "bf16": dtype == torch.bfloat16,
                "folder": folder,
            }
            asked |= {"use_cpu": device.type == "cpu", "took": lambda wall, cpu: turn(trainer=(wall, cpu))}
            hugging.train(config, batch.inputs_RN, **asked)
    return rounds[1:]


def _missing() -> str:
    """What must be installed for transformers.Trainer to be measured, or nothing."""
    return ", ".join(name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None)


def _rates(n_tokens: int, rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: n_tokens / statistics.median(found[name] for found in rounds) for name in rounds[0]}


def _times(rounds: list[dict[str, float]]) -> dict[str, float]:
    """How many times as fast as each of the others ours is."""
    others = [name for name in rounds[0] if name != "ours"]
    return {name: statistics.median(found[name] / found["ours"] for found in rounds) for name in others}


def _seconds(step: Callable[[], object], device: torch.device) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    sys.exit(main())
