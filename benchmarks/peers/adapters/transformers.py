"""Adapter of the generate() of transformers, eager on the CPU. A streamer times each step."""

from __future__ import annotations

import time
from importlib.metadata import version

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from benchmarks.peers.adapters.protocol import Adapter, AdapterOptions, UnsupportedError, run

_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


class StepTimer(BaseStreamer):
    """Times at which each batch of tokens was ready; the first one is the prompt itself."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        del value
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class TransformersAdapter(Adapter):
    """One model."""

    def __init__(self, options: AdapterOptions) -> None:
        if options.precision not in _DTYPES:
            raise UnsupportedError(f"no {options.precision} on the CPU without further packages")
        torch.set_num_threads(options.threads)
        # A local directory, not a name to download.
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=_DTYPES[options.precision])  # nosec B615
        self._model = model.eval()
        self._model.generation_config = GenerationConfig()  # its own would add a repetition penalty

    def facts(self) -> dict[str, str]:
        attention = str(self._model.config._attn_implementation)
        return {"version": version("transformers"), "torch": version("torch"), "attention": attention}

    def decode(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        times, rows = self._generate(prompts, tokens)
        return times[-1] - times[1], rows

    def prefill(self, prompt: list[int]) -> float:
        times, _ = self._generate([prompt], 1)
        return times[1] - times[0]

    def _generate(self, prompts: list[list[int]], tokens: int) -> tuple[list[float], list[list[int]]]:
        ids = torch.tensor(prompts)
        config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        timer = StepTimer()
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=timer
            )
        return timer.times, out[:, ids.shape[1] :].tolist()


if __name__ == "__main__":
    run(TransformersAdapter)
