"""Baseline: the generate() of transformers on the same shapes with random weights, in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch

from benchmarks.gpu.machine import synchronize
from benchmarks.gpu.results import Finding, StageContext
from benchmarks.shapes import SHAPES, smaller, transformers_config


def hugging(context: StageContext) -> Iterator[Finding]:
    """Measures bfloat16, SDPA attention, the default cache, greedy; subtracts the time to the first token."""
    prompt, tokens, repeats = (9, 4, 1) if context.tiny else (200, 32, 3)
    for name in ("gpt2",) if context.tiny else ("8b", "1b", "gpt2"):
        model = _model(name, context)
        for rows in (2,) if context.tiny else (1, 32):
            first, last = (_seconds(model, rows, prompt, n, context.device, repeats) for n in (1, 1 + tokens))
            step = (last - first) / tokens
            yield Finding(
                what=f"{name}, decode x{rows}",
                value=rows / step if step > 0 else 0.0,
                unit="tokens/s",
                note=f"{step * 1000:.3f} ms a step; {prompt} tokens to the first one {first * 1000:.1f} ms",
            )
        del model
        if context.device == "cuda":
            torch.cuda.empty_cache()


def _model(name: str, context: StageContext) -> Any:
    """Creates the model on the device in its number format."""
    shape = SHAPES["A" if name == "gpt2" else name]
    dtype = "float32" if context.device == "cpu" else "bfloat16"
    config = transformers_config(smaller(shape) if context.tiny else shape, dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))  # older versions do not look at the configuration's
    try:
        with torch.device(context.device):
            create = import_module("transformers").AutoModelForCausalLM.from_config
            model = create(config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(before)
    return model.requires_grad_(False).eval()


def _seconds(model: Any, rows: int, prompt: int, tokens: int, device: str, repeats: int) -> float:
    taken = []
    for _ in range(1 + repeats):
        ids_RT = torch.randint(model.config.vocab_size, (rows, prompt), device=device)
        synchronize(device)
        start = time.perf_counter()
        made_RT = model.generate(
            ids_RT,
            attention_mask=torch.ones_like(ids_RT),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
        synchronize(device)
        taken.append(time.perf_counter() - start)
        assert made_RT.shape == (rows, prompt + tokens)
    return statistics.median(taken[1:])
