"""The generate() of transformers, eager on the CPU. Its streamer reports each step."""

from __future__ import annotations

import time
from importlib.metadata import version

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from benchmarks.peers.sides.protocol import CannotError, Generated, Load, Loaded, Task, run

_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


class Clock(BaseStreamer):
    """When each batch of tokens was there; the first one is the prompt itself."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        del value
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Transformers:
    """One model."""

    def __init__(self, task: Task) -> None:
        if task.precision not in _DTYPES:
            raise CannotError("no int8 on the CPU without further packages")
        torch.set_num_threads(task.threads)
        # A directory of this machine, not a name to download.
        model = AutoModelForCausalLM.from_pretrained(task.model, dtype=_DTYPES[task.precision])  # nosec B615
        self._model = model.eval()

    def facts(self) -> dict[str, str]:
        attention = str(self._model.config._attn_implementation)
        return {"version": version("transformers"), "torch": version("torch"), "attention": attention}

    def decode(self, prompts: list[list[int]], tokens: int) -> Generated:
        times, rows = self._generate(prompts, tokens)
        return Generated(seconds=times[-1] - times[1], rows=rows)

    def prefill(self, prompt: list[int]) -> float:
        times, _ = self._generate([prompt], 1)
        return times[1] - times[0]

    def serve(self, load: Load) -> Loaded:
        raise CannotError(f"transformers has no server to compare with at {load.streams} streams")

    def _generate(self, prompts: list[list[int]], tokens: int) -> tuple[list[float], list[list[int]]]:
        ids = torch.tensor(prompts)
        config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        clock = Clock()
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=clock
            )
        return clock.times, out[:, ids.shape[1] :].tolist()


if __name__ == "__main__":
    run(Transformers)
