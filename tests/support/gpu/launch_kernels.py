"""Launches every step's kernels through Triton's GPU path, without a GPU, and prints the requested variants.

Nothing is compiled and nothing computed: what is asked for is noted. In a process with TRITON_INTERPRET=1 there is no
such way, so the tests start this one without it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from app.common.types import Request, SamplingParams
from app.engine.execution.engine import Engine
from app.engine.execution.warmup_batches import dummies
from app.engine.gpu.kernels.interface import RowLookup
from app.engine.gpu.kernels.triton.quantized_products import int8_product
from app.engine.gpu.linears import quantize_decoder
from app.engine.gpu.triton_loader import QuantizedKernels, triton_kernels
from app.engine.scheduling.block_allocator import BlockPool
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from tests.support.gpu.emulated_engine import tiny_device_runner
from tests.support.model.tiny_models import run_all, tiny_config, tiny_decoder

ROWS, TOKENS, BLOCKS = 12, 64, 96


class Driver:
    """A Hopper GPU, as far as Triton queries it before a kernel is compiled."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def asked() -> list[Request]:
    """Requests of all lengths, alone and batched, with all sampling parameters of the device."""
    params = [
        SamplingParams(temperature=0),
        SamplingParams(top_k=5, logprobs=3),
        SamplingParams(top_p=0.5, repetition_penalty=1.2, presence_penalty=0.1, logit_bias=((3, 1.0),)),
    ]
    lengths = [1, 2, 15, 16, 17, 31, 50, 63, 64, 65, 300, 513, *range(1, 13)]
    return [
        Request(id=f"{i}", prompt=(1,) * length, max_tokens=2 + i % 5, params=params[i % 3])
        for i, length in enumerate(lengths)
    ]


def main() -> dict[str, Any]:
    """Variants that the warm-up and the capture ask for, and those that only requests do."""
    wanted: set[str] = set()
    triton.runtime.driver.set_active(Driver())
    # True: no need to compile it.
    triton.knobs.runtime.jit_cache_hook = lambda *, key, fn, **_: not wanted.add(f"{fn.name.split('.')[-1]} {key}")
    found = triton_kernels()
    assert found
    shape = tiny_config(context=640, vocab_size=333, tied_head=False, qk_norm=True, n_layers=1)
    decoder = tiny_decoder(shape, dtype=torch.bfloat16)
    quantize_decoder(decoder, "int8", QuantizedKernels(int8_product=int8_product))
    runner = tiny_device_runner(
        decoder,
        max_running=ROWS,
        tokens_per_step=TOKENS,
        blocks=BLOCKS,
        block_size=64,
        kernels=found.kernels,
    )
    look_up = found.kernels.look_up
    # Nothing is computed, and an embedding must be in its table.
    vars(found.kernels)["look_up"] = lambda *asked: RowLookup(*[column_S.zero_() for column_S in look_up(*asked)])
    runner.warm_up(TOKENS)
    runner.capture(lambda work: (work(), work)[1])
    early = sorted(wanted)
    runner.graphs.steps.out.numbers_X.zero_()  # no step has sampled a token yet
    scheduler = Scheduler(StepLimits(tokens_per_step=TOKENS, max_running=ROWS), BlockPool(BLOCKS, 64))
    texts = run_all(Engine(scheduler, runner, runner), asked())
    runner.run(dummies(1, TOKENS, prompt_logprobs=0))
    return {"early": early, "late": sorted(wanted - {*early}), "tokens": sum(map(len, texts.values()))}


if __name__ == "__main__":
    with torch.inference_mode():
        json.dump(main(), sys.stdout, indent=1)
