"""Training speed against transformers.Trainer: `python -m benchmarks.train`.

Both train the same shape on the same tokens in memory, with the same windows per step, micro-batch, threads and number
format; Trainer is set up as its documentation shows. Steps alternate, so that a slow moment of the machine affects
both; the first step of each is not counted. Times include the optimizer (Muon and AdamW here, AdamW there). The last
line of stdout is one JSON object.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.common import command_line, print_result
from benchmarks.shapes import transformers_config
from model.config import ModelConfig
from model.device import choose_device, choose_dtype
from model.nn.transformer import Decoder
from model.presets import preset
from model.train.data.batch import batch_of_windows
from model.train.step.distributed import ProcessGroup
from model.train.step.objective import Objective, choose_loss_backend
from model.train.step.optimizer import ParameterUpdates
from model.train.step.thread_pool import keep_freed_memory
from model.train.step.trainer import Trainer

_Clocks = tuple[float, float]
"""Wall and CPU seconds."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("train", __doc__)
    add = parser.add_argument
    add("--preset", choices=("nano", "small", "base"), default="small", help="shape of the model (%(default)s)")
    add("--rounds", type=int, default=5, help="counted steps of each (%(default)s)")
    add("--windows", type=int, default=16, help="windows per step (%(default)s)")
    add("--micro-windows", type=int, default=4, help="windows per micro-batch (%(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--busy", type=int, default=0, help="processes that compute all the time meanwhile (%(default)s)")
    options = parser.parse_args(argv)
    if not all(map(find_spec, ("transformers", "accelerate"))):
        parser.error("transformers.Trainer needs transformers and accelerate: pip install transformers accelerate")
    if min(options.rounds, options.windows, options.micro_windows, options.busy + 1) < 1:
        parser.error("--rounds, --windows and --micro-windows must be at least 1, --busy at least 0")
    if options.windows % options.micro_windows:
        parser.error("--windows must be a multiple of --micro-windows")
    config, device = preset(options.preset), choose_device(options.device)
    dtype, generator = choose_dtype("auto", device), torch.Generator().manual_seed(1)
    windows_BN = torch.randint(config.vocab_size, (options.windows, config.context + 1), generator=generator)
    with _busy_processes(options.busy):
        rounds = _rounds(windows_BN, options.preset, device, dtype, options.micro_windows, options.rounds)
    n_tokens, results = options.windows * config.context, dict[str, object]()
    for index, clock in enumerate(("second", "cpu_second")):
        seconds = [{name: clocks[index] for name, clocks in round_.items()} for round_ in rounds]
        rates = {name: n_tokens / statistics.median(each[name] for each in seconds) for name in seconds[0]}
        times = statistics.median(each["trainer"] / each["ours"] for each in seconds)
        results |= {f"tokens_per_{clock}": rates, f"times_by_{clock}": times}
        print(f"tokens per {clock}: ours {rates['ours']:.0f}, Trainer {rates['trainer']:.0f}: {times:.2f} times")
    environment = {"torch": str(torch.__version__), "threads": torch.get_num_threads()}
    device_and_dtype = {"device": device.type, "dtype": str(dtype).removeprefix("torch.")}
    print_result("train", **environment, **vars(options) | device_and_dtype, **results)
    return 0


@contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    """Other work on the cores, in another session, as in another terminal: the system divides cores by session."""
    loop = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(loop, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def make_trainer(config: ModelConfig, device: torch.device, dtype: torch.dtype, micro_windows: int | None) -> Trainer:
    """inkstream's trainer of a new decoder, with Muon."""
    decoder = Decoder(config).initialize(1).to(device)
    optimizer = ParameterUpdates(decoder, "muon", matrix_lr=0.02, other_lr=0.004, weight_decay=0.05)
    objective = Objective(decoder, device, dtype, choose_loss_backend("auto", device.type))
    return Trainer(objective, optimizer, ema=0.0, ranks=ProcessGroup(), micro_windows=micro_windows)


def _rounds(
    windows_BN: Tensor, name: str, device: torch.device, dtype: torch.dtype, micro_batch: int, rounds: int
) -> list[dict[str, _Clocks]]:
    """Clocks of a step of each, by round."""
    transformers = import_module("transformers")
    config, batch = preset(name), batch_of_windows(windows_BN)
    trainer = make_trainer(config, device, dtype, micro_batch)
    keep_freed_memory()  # the baseline benefits too
    measured: list[dict[str, _Clocks]] = []

    class OurStep(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        """Times each step of Trainer, and runs a step of inkstream's trainer before the next one."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = _clocks(device)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            theirs, started = _since(self.started, device), _clocks(device)
            trainer.gradients(batch)
            trainer.update(0, 1.0)
            measured.append({"ours": _since(started, device), "trainer": theirs})

    with TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=1 + rounds,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=len(windows_BN) // micro_batch,
            use_cpu=device.type == "cpu",
            bf16=dtype == torch.bfloat16,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        model = transformers.LlamaForCausalLM(transformers_config(config, "float32"))
        windows = _Windows(batch.inputs_RN.repeat(1 + rounds, 1))
        transformers.Trainer(model, arguments, train_dataset=windows, callbacks=[OurStep()]).train()
    return measured[1:]


class _Windows(Dataset[dict[str, Tensor]]):
    def __init__(self, inputs_BN: Tensor) -> None:
        self.inputs_BN = inputs_BN

    def __len__(self) -> int:
        return len(self.inputs_BN)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.inputs_BN[index], "labels": self.inputs_BN[index]}


def _clocks(device: torch.device) -> _Clocks:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def _since(started: _Clocks, device: torch.device) -> _Clocks:
    wall, cpu = _clocks(device)
    return wall - started[0], cpu - started[1]


if __name__ == "__main__":
    sys.exit(main())
