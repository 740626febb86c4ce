"""Adapter of OpenVINO GenAI's continuous batching, stepped by hand in this process."""

from __future__ import annotations

import time
from importlib.metadata import version
from itertools import count

import numpy as np
import openvino as ov
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig
from openvino_genai.py_openvino_genai import GenerationHandle

from benchmarks.peers.adapters.protocol import Adapter, AdapterOptions, DecodeResult, ServeLoad, ServeResult, run

# int8 weights run with OpenVINO's defaults: activations quantized in groups, 8-bit KV cache.
_HINTS = {
    "bf16": {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"},
    "f32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    "int8": {"INFERENCE_PRECISION_HINT": "bf16"},
}


class OpenVINOAdapter(Adapter):
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
        self._numbers = count()
        self._precision = options.precision

    def facts(self) -> dict[str, str]:
        return {"version": version("openvino-genai"), **_HINTS[self._precision]}

    def decode(self, prompts: list[list[int]], tokens: int) -> DecodeResult:
        handles = [self._add(prompt, _config(tokens)) for prompt in prompts]
        while not all(handle.can_read() for handle in handles):
            self._pipe.step()
        rows: list[list[int]] = [_read(handle) for handle in handles]
        assert all(len(row) == 1 for row in rows), "the prompts were not read in one step"
        started = time.perf_counter()
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
        seconds = time.perf_counter() - started
        for row, handle in zip(rows, handles, strict=True):
            while handle.can_read():
                row += _read(handle)
        return DecodeResult(seconds=seconds, rows=rows)

    def prefill(self, prompt: list[int]) -> float:
        handle = self._add(prompt, _config(1))
        started = time.perf_counter()
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
        seconds = time.perf_counter() - started
        assert len(_read(handle)) == 1
        return seconds

    def serve(self, load: ServeLoad) -> ServeResult:
        """Text in, token ids out: does not count detokenizing and sending them."""
        waiting = list(enumerate(load.prompts))
        running: dict[int, tuple[GenerationHandle, float, list[float]]] = {}
        first: list[float] = []
        gaps: list[float] = []
        tokens = 0
        began = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < load.streams:
                seed, prompt = waiting.pop(0)
                config = _config(load.tokens, temperature=load.temperature, seed=seed)
                sent = time.perf_counter()
                running[seed] = self._pipe.add_request(next(self._numbers), prompt, config), sent, []
            self._pipe.step()
            now = time.perf_counter()
            for seed, (handle, sent, arrivals) in list(running.items()):
                while handle.can_read():
                    tokens += len(_read(handle))
                    (gaps if arrivals else first).append(now - (arrivals[-1] if arrivals else sent))
                    arrivals.append(now)
                if len(arrivals) == load.tokens:
                    del running[seed]
        return ServeResult(seconds=time.perf_counter() - began, tokens=tokens, first=first, gaps=gaps)

    def _add(self, prompt: list[int], config: GenerationConfig) -> GenerationHandle:
        return self._pipe.add_request(next(self._numbers), ov.Tensor(np.array([prompt], dtype=np.int64)), config)


def _config(tokens: int, *, temperature: float = 0.0, seed: int = 0) -> GenerationConfig:
    config = GenerationConfig()
    config.max_new_tokens = tokens
    config.ignore_eos = True
    if temperature:
        config.do_sample = True
        config.temperature = temperature
        config.rng_seed = seed
    return config


def _read(handle: GenerationHandle) -> list[int]:
    (output,) = handle.read().values()
    return list(output.generated_ids)


if __name__ == "__main__":
    run(OpenVINOAdapter)
