"""Adapter of CTranslate2's generator. Decode time is a whole run minus one that ends at its first token."""

from __future__ import annotations

import json
import time
from importlib.metadata import version

import ctranslate2

from benchmarks.peers.adapters.protocol import Adapter, AdapterOptions, DecodeResult, UnsupportedError, run

_TYPES = {"bf16": "bfloat16", "f32": "float32", "int8": "int8_float32"}


class CTranslate2Adapter(Adapter):
    """CTranslate2 takes and returns tokens as text, by the vocabulary file next to the model."""

    def __init__(self, options: AdapterOptions) -> None:
        kind = _TYPES[options.precision]
        supported = ctranslate2.get_supported_compute_types("cpu")
        if kind not in supported:
            raise UnsupportedError(f"it supports {', '.join(sorted(supported))} on this CPU, not {kind}")
        self._names: list[str] = json.loads((options.model / "vocabulary.json").read_text())
        self._ids = {name: number for number, name in enumerate(self._names)}
        self._generator = ctranslate2.Generator(
            str(options.model), device="cpu", compute_type=kind, inter_threads=1, intra_threads=options.threads
        )

    def facts(self) -> dict[str, str]:
        return {"version": version("ctranslate2"), "compute_type": self._generator.compute_type}

    def decode(self, prompts: list[list[int]], tokens: int) -> DecodeResult:
        whole, rows = self._generate(prompts, tokens)
        first, _ = self._generate(prompts, 1)
        return DecodeResult(seconds=whole - first, rows=rows)

    def prefill(self, prompt: list[int]) -> float:
        return self._generate([prompt], 1)[0]

    def _generate(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        token_texts = [[self._names[token] for token in prompt] for prompt in prompts]
        started = time.perf_counter()
        results = self._generator.generate_batch(
            token_texts,
            max_length=tokens,
            min_length=tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
            max_batch_size=0,
        )
        seconds = time.perf_counter() - started
        return seconds, [[self._ids[name] for name in result.sequences[0]] for result in results]


if __name__ == "__main__":
    run(CTranslate2Adapter)
