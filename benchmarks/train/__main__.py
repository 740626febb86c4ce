"""Training speed against a plain PyTorch loop and transformers.Trainer: `python -m benchmarks.train`.

All train the same shape on the same tokens in memory, with the same windows per step, micro-batch, threads and number
format. Steps alternate, so that a slow moment of the machine affects all; the first step of each is not counted. Times
include the optimizer (Muon and AdamW here, AdamW in the baselines). The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.common import command_line, print_result
from benchmarks.train.plain_pytorch import PlainLoop
from model.device import choose_device, choose_dtype
from model.nn.transformer import Decoder
from model.presets import preset
from model.train.common.thread_pool import keep_freed_memory
from model.train.data.batch import batch_of_windows
from model.train.step.distributed import ProcessGroup
from model.train.step.loss_backend import choose_loss_backend
from model.train.step.objective import Objective
from model.train.step.optimizer import ParameterUpdates
from model.train.step.trainer import Trainer


def main(argv: Sequence[str] | None = None) -> int:
    p = command_line("train", __doc__)
    p.add_argument(
        "--preset", choices=("nano", "small", "base"), default="small", help="shape of the model (%(default)s)"
    )
    p.add_argument("--rounds", type=int, default=5, help="counted steps of each (%(default)s)")
    p.add_argument("--windows", type=int, default=16, help="windows per step (%(default)s)")
    p.add_argument("--micro-windows", type=int, default=4, help="windows per micro-batch (%(default)s)")
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
    rates, per_cpu_second = ([figures[i] for figures in rounds] for i in range(2))
    result = {"tokens_per_second": _rates(n_tokens, rates), "tokens_per_cpu_second": _rates(n_tokens, per_cpu_second)}
    times = {"times": _times(rates), "times_by_cpu": _times(per_cpu_second)}
    for name, rate in result["tokens_per_second"].items():
        print(f"{name:8} {rate:8.0f} tokens/s, {result['tokens_per_cpu_second'][name]:8.0f} per CPU second")
    for name, ratio in times["times"].items():
        by_cpu = times["times_by_cpu"][name]
        print(f"ours is {ratio:.2f} times {name}, {by_cpu:.2f} by CPU time (medians of {options.rounds} rounds)")
    if _missing_packages():
        print(f"not measured: transformers.Trainer, which needs {_missing_packages()} (pip install 'inkstream[bench]')")
    facts = {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        **vars(options),
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
    }
    print_result("train", **facts, **result, **times)
    return 0


def _rounds(
    options: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Wall seconds and CPU seconds of a step of each, by round."""
    config, generator = preset(options.preset), torch.Generator().manual_seed(1)
    windows_BN = torch.randint(config.vocab_size, (options.windows, config.context + 1), generator=generator)
    batch = batch_of_windows(windows_BN)
    decoder = Decoder(config).initialize(1).to(device)
    optimizer = ParameterUpdates(decoder, "muon", matrix_lr=0.02, other_lr=0.004, weight_decay=0.05)
    objective = Objective(decoder, device, dtype, choose_loss_backend("auto", device.type))
    micro_batch = options.micro_windows
    trainer = Trainer(objective, optimizer, ema=0.0, ranks=ProcessGroup(), micro_windows=micro_batch)
    plain = PlainLoop(config, device, dtype, micro_batch)

    def ours() -> None:
        trainer.gradients(batch)
        trainer.update(0, 1.0)

    steps: dict[str, Callable[[], object]] = {
        "ours": ours,
        "plain": lambda: plain.step(batch.inputs_RN, batch.targets_RN),
    }
    keep_freed_memory()  # the baselines benefit too
    rounds: list[tuple[dict[str, float], dict[str, float]]] = []

    def record_round(**transformers: tuple[float, float]) -> None:
        seconds = {name: _seconds(step, device) for name, step in steps.items()} | transformers
        rounds.append(
            ({name: wall for name, (wall, _) in seconds.items()}, {name: cpu for name, (_, cpu) in seconds.items()})
        )

    if _missing_packages():
        for _ in range(1 + options.rounds):
            record_round()
    else:
        trainer_module = importlib.import_module("benchmarks.train.transformers_trainer")
        with TemporaryDirectory() as folder:
            arguments: dict[str, Any] = {
                "micro_batch": micro_batch,
                "steps": 1 + options.rounds,
                "bf16": dtype == torch.bfloat16,
                "folder": folder,
            }
            arguments |= {
                "use_cpu": device.type == "cpu",
                "on_step": lambda wall, cpu: record_round(trainer=(wall, cpu)),
            }
            trainer_module.train(config, batch.inputs_RN, **arguments)
    return rounds[1:]


def _missing_packages() -> str:
    """Packages that transformers.Trainer needs and that are not installed, or nothing."""
    return ", ".join(name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None)


def _rates(n_tokens: int, rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: n_tokens / statistics.median(figures[name] for figures in rounds) for name in rounds[0]}


def _times(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Speedup over each of the baselines."""
    others = [name for name in rounds[0] if name != "ours"]
    return {name: statistics.median(figures[name] / figures["ours"] for figures in rounds) for name in others}


def _seconds(step: Callable[[], object], device: torch.device) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    sys.exit(main())
