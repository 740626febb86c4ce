"""Launches the kernels of engine steps through Triton's GPU path, without a GPU, and prints the requested variants.

It compiles and computes nothing: it records the requested variants and the launches of captured steps. Triton has no
such path in a process with TRITON_INTERPRET=1, so the tests start this program without it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from app.common.types import Request, SamplingParams
from app.engine.execution.engine import Engine
from app.engine.execution.warmup_batches import dummies
from app.engine.gpu.kernels.interface import RowLookup
from app.engine.gpu.kernels.triton.operations import TritonKernels
from app.engine.gpu.kernels.triton.quantized_products import packed_product
from app.engine.gpu.linears import pack_decoder
from app.engine.gpu.runner import DeviceRunner
from app.engine.gpu.triton_loader import QuantizedKernels, triton_kernels
from app.engine.scheduling.block_pool import BlockPool
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from benchmarks.gpu.compilation import Driver, engine_launches
from model.config import ModelConfig
from tests.support.gpu.emulated_engine import tiny_device_runner
from tests.support.model.tiny_models import mixture_config, quantized_weights, run_all, tiny_config, tiny_decoder

ROWS, TOKENS, BLOCKS, BLOCK = 12, 64, 96, 64
SHAPE = tiny_config(context=640, vocab_size=333, tied_head=False, qk_norm="head", n_layers=1)
MIXTURE = replace(
    mixture_config(count=4, chosen=3), context=640, vocab_size=333, n_layers=1, sinks=True, activation="swiglu_clamped"
)
"""Items have 16 tokens in steps of up to 21 tokens, and 64 in others."""


class LaunchCounter(TorchDispatchMode):
    """Records what a captured step launches: Triton kernels, and torch operations except views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self._run = JITFunction.run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not (func.is_view or "empty" in name or name in ("_unsafe_view", "detach")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """A `Capture` that records the launches of the step captured last, the one with the fewest rows and splits."""

        def count(kernel: Any, *args: Any, **options: Any) -> Any:
            self.names.append(kernel.__name__)
            return self._run(kernel, *args, **options)

        self.names = []
        JITFunction.run = count
        try:
            with self:
                work()
        finally:
            JITFunction.run = self._run
        return work


def make_requests() -> list[Request]:
    """Requests of many lengths, which run alone and batched, with all sampling parameters of the device."""
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


def device_runner(kernels: Any, shape: ModelConfig, *, int8: bool) -> DeviceRunner:
    """The runner of a decoder."""
    decoder = tiny_decoder(shape, dtype=torch.bfloat16)
    decoder.make_tables()  # in float32, as in an engine
    if int8:
        reader = quantized_weights(decoder, "int8")
        pack_decoder(decoder, reader, QuantizedKernels(packed_product=packed_product), packs_experts=True)
    sizes = {"max_running": ROWS, "tokens_per_step": TOKENS, "blocks": BLOCKS, "block_size": BLOCK}
    return tiny_device_runner(decoder, **sizes, kernels=kernels)


def launches_per_layer(kernels: Any, shape: ModelConfig) -> list[str]:
    """Launches that one more layer adds to the captured step with the most launches."""
    steps = []
    for n_layers in (1, 2):
        counter, found = LaunchCounter(), list[list[str]]()

        def capture(work: Callable[[], None], counter: LaunchCounter = counter, found: Any = found) -> Any:
            replay = counter.capture(work)
            found.append(counter.names)
            return replay

        device_runner(kernels, replace(shape, n_layers=n_layers), int8=False).capture(capture)
        steps.append(max(found, key=len))
    return [name for name in sorted(set(steps[1])) for _ in range(steps[1].count(name) - steps[0].count(name))]


def main() -> dict[str, Any]:
    """The facts of a dense model, and those of a mixture of experts."""
    return {**facts_of(SHAPE), "mixture": facts_of(MIXTURE)}


def facts_of(shape: ModelConfig) -> dict[str, Any]:
    """Variants requested at startup, those requested only by requests, and those missing in the variant table."""
    wanted: set[str] = set()
    triton.runtime.driver.set_active(Driver(90))
    # The hook returns True: Triton must not compile the variant.
    triton.knobs.runtime.jit_cache_hook = lambda *, key, fn, **_: not wanted.add(f"{fn.name.split('.')[-1]} {key}")
    found = triton_kernels()
    assert found
    look_up = found.kernels.look_up
    # Nothing computes token ids, so zero them: embeddings must be within their table.
    vars(found.kernels)["look_up"] = lambda *args: RowLookup(*[column_S.zero_() for column_S in look_up(*args)])
    per_layer = launches_per_layer(found.kernels, shape)
    wanted.clear()
    for launch in engine_launches("", shape, torch.bfloat16, BLOCK, ROWS).values():
        launch(TritonKernels())
    table = set(wanted)
    wanted.clear()
    plain = device_runner(found.kernels, shape, int8=False)
    plain.warm_up(TOKENS)
    plain.capture(lambda work: (work(), work)[1])
    missing = sorted(wanted - table)
    wanted.clear()
    runner = device_runner(found.kernels, shape, int8=True)
    runner.warm_up(TOKENS)
    runner.capture(lambda work: (work(), work)[1])
    early = sorted(wanted)
    runner.graphs.executor.out.numbers_X.zero_()  # no step has sampled a token yet
    scheduler = Scheduler(StepLimits(tokens_per_step=TOKENS, max_running=ROWS), BlockPool(BLOCKS, BLOCK))
    texts = run_all(Engine(scheduler, runner, runner), make_requests())
    runner.run(dummies(1, TOKENS, prompt_logprobs=0))
    late = sorted(wanted - {*early})
    tokens = sum(map(len, texts.values()))
    return {"missing": missing, "early": early, "late": late, "tokens": tokens, "layer": per_layer}


if __name__ == "__main__":
    with torch.inference_mode():
        json.dump(main(), sys.stdout, indent=1)
