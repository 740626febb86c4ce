"""Adapter of OpenVINO GenAI's continuous batching, stepped by hand in this process."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import openvino as ov
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig
from openvino_genai.py_openvino_genai import GenerationHandle

from benchmarks.peers.adapters.protocol import AdapterOptions, SteppedAdapter, run

# int8 and int4 weights run with OpenVINO's defaults: activations quantized in groups, 8-bit KV cache.
_HINTS = {
    "bf16": {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"},
    "f32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    "int8": {"INFERENCE_PRECISION_HINT": "bf16"},
    "int4": {"INFERENCE_PRECISION_HINT": "bf16"},
}


class OpenVINOAdapter(SteppedAdapter):
    """One pipeline without prefix cache."""

    def __init__(self, options: AdapterOptions) -> None:
        scheduler = SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.max_num_seqs = max(options.batch, 1)
        scheduler.max_num_batched_tokens = options.batch * 64 + 1024
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        properties = {**_HINTS[options.precision], "INFERENCE_NUM_THREADS": options.threads}
        self._pipe = ContinuousBatchingPipeline(str(options.model), scheduler, "CPU", properties)
        self._handles: list[GenerationHandle] = []
        self._precision = options.precision

    def facts(self) -> dict[str, str]:
        return {"version": version("openvino-genai"), **_HINTS[self._precision]}

    def add(self, prompt: list[int] | str, tokens: int, temperature: float = 0.0, seed: int = 0) -> int:
        config = GenerationConfig()
        config.max_new_tokens = tokens
        config.ignore_eos = True
        if temperature:
            config.do_sample = True
            config.temperature = temperature
            config.rng_seed = seed
        number = len(self._handles)
        given = prompt if isinstance(prompt, str) else ov.Tensor(np.array([prompt], dtype=np.int64))
        self._handles.append(self._pipe.add_request(number, given, config))
        return number

    def step(self) -> None:
        self._pipe.step()

    def is_busy(self) -> bool:
        return bool(self._pipe.has_non_finished_requests())

    def take(self, request: int) -> list[int]:
        tokens: list[int] = []
        while self._handles[request].can_read():
            (output,) = self._handles[request].read().values()
            tokens += output.generated_ids
        return tokens


if __name__ == "__main__":
    run(OpenVINOAdapter)
