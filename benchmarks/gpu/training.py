"""Speed of a training step: tokens per second of the preset `base`, and its share of the peak."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch

from benchmarks.gpu.machine import synchronize
from benchmarks.gpu.results import Finding, StageContext
from benchmarks.train import make_trainer
from model.device import choose_dtype
from model.presets import preset
from model.train.data.batch import batch_of_windows

_STEP_TOKENS, _WARM_UP, _STEPS = 65_536, 3, 20


def train(context: StageContext) -> Iterator[Finding]:
    """Random tokens; a step is gradients and update, and reads its loss once. The first steps compile."""
    config, device = preset("nano" if context.tiny else "base"), torch.device(context.device)
    windows = 2 if context.tiny else _STEP_TOKENS // config.context
    trainer = make_trainer(config, device, choose_dtype("auto", device), None)
    batch = batch_of_windows(torch.randint(config.vocab_size, (windows, config.context + 1)))
    seconds = []
    for _ in range(2 if context.tiny else _WARM_UP + _STEPS):
        started = time.perf_counter()
        trainer.gradients(batch)
        trainer.update(0, 1.0)
        synchronize(context.device)
        seconds.append(time.perf_counter() - started)
    step = statistics.median(seconds[1 if context.tiny else _WARM_UP :])
    tokens = windows * config.context
    # 2 operations a weight forward, 4 backward. Products of attention are not counted.
    peak = context.roof("bf16 operations/s")
    share = 6 * trainer.decoder.n_params * tokens / step / peak if peak else None
    memory = torch.cuda.max_memory_allocated() / 2**30 if context.device == "cuda" else 0.0
    note = f"{1000 * step:.1f} ms a step of {tokens:,} tokens, {sum(seconds[:_WARM_UP]):.1f} s for the first {_WARM_UP}"
    yield Finding(
        what="steps",
        value=tokens / step,
        unit="tokens/s",
        share=share,
        note=note + f"; {memory:.1f} GiB at most" * bool(memory),
    )
