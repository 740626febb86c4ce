"""Baseline: the generate() of transformers on the same shapes with random weights, in the same run."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.results import Finding, StageContext
from benchmarks.gpu.timing import DeviceTimer

_LLAMAS: dict[str, dict[str, Any]] = {
    "1b": {
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
    },
    "8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "rope_theta": 500_000.0,
    },
}
_TINY_LLAMA = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}
_PROMPT, _TOKENS, _ROWS = 200, 32, (1, 32)


def run(context: StageContext) -> Iterator[Finding]:
    """Measures bfloat16, SDPA attention, the default cache, greedy; subtracts the time to the first token."""
    for name in ("gpt2",) if context.tiny else ("8b", "1b", "gpt2"):
        model = _model(name, context)
        for rows in (2,) if context.tiny else _ROWS:
            yield _speed(model, name, rows, context)
        del model
        if context.device == "cuda":
            torch.cuda.empty_cache()


def _model(name: str, context: StageContext) -> Any:
    """Creates the model on the device in its number format."""
    hugging = importlib.import_module("transformers")
    if name == "gpt2":
        config = hugging.GPT2Config(
            **({"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 320} if context.tiny else {})
        )
    else:
        config = hugging.LlamaConfig(**(_TINY_LLAMA if context.tiny else _LLAMAS[name]), max_position_embeddings=4096)
    config.bos_token_id = config.eos_token_id = None
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if context.device == "cpu" else torch.bfloat16)
    try:
        with torch.device(context.device):
            model = hugging.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(before)
    return model.requires_grad_(False).eval()


def _speed(model: Any, name: str, rows: int, context: StageContext) -> Finding:
    prompt, tokens, repeats = (9, 4, 1) if context.tiny else (_PROMPT, _TOKENS, 3)
    seconds = {count: _seconds(model, rows, prompt, count, context, repeats) for count in (1, 1 + tokens)}
    step = (seconds[1 + tokens] - seconds[1]) / tokens
    return Finding(
        what=f"{name}, decode x{rows}",
        value=rows / step if step > 0 else 0.0,
        unit="tokens/s",
        note=f"{step * 1000:.3f} ms a step; {prompt} tokens to the first one {seconds[1] * 1000:.1f} ms",
    )


def _seconds(model: Any, rows: int, prompt: int, tokens: int, context: StageContext, repeats: int) -> float:
    timer, taken = DeviceTimer(context.device), []
    for _ in range(1 + repeats):
        ids_RT = torch.randint(model.config.vocab_size, (rows, prompt), device=context.device)
        timer.synchronize()
        start = time.perf_counter()
        made_RT = model.generate(
            ids_RT,
            attention_mask=torch.ones_like(ids_RT),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
        timer.synchronize()
        taken.append(time.perf_counter() - start)
        assert made_RT.shape == (rows, prompt + tokens)
    return statistics.median(taken[1:])
