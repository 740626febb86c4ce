"""Prompt encoder: fill-in-the-middle, and truncation that reads only the end of a long prompt."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as RustTokenizer

from app.access.tenant_queue import WorkAccount
from app.common.errors import InvalidRequest
from app.common.ipc import Ready
from app.generation.prompt_encoder import EncodedPrompt, PromptEncoder, infill_tokens
from app.generation.request import GenerationRequest
from app.tokenization.text_encoder import TextEncoder, TokenizerPool
from model.tokenizer.tokenizer import Tokenizer
from tests.support.model.sample_tokenizers import KINDS, save
from tests.support.model.tiny_models import tiny_weights
from tests.support.servers import running_server

NAMES = [
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
]
READY: dict[str, Any] = {
    "context": 512, "vocab_size": 400, "n_params": 1, "dtype": "float32", "device": "cpu", "weights_version": "",
    "eos_ids": (), "start_id": 0, "sampling_defaults": {}, "blocks_total": 1, "block_size": 16, "has_encoder": False,
    "numerics": "torch", "numerics_reason": "", "waits_for_build": False,
}  # fmt: skip


def _read(tokenizer: Tokenizer, **fields: Any) -> list[EncodedPrompt]:
    texts = TokenizerPool()
    try:
        return asyncio.run(
            PromptEncoder(Ready(**READY), TextEncoder(tokenizer), texts, WorkAccount()).encode_prompts(
                GenerationRequest(**fields)
            )
        )
    finally:
        texts.close()


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("kind", ["gpt2", "llama3"])
def test_infill_prompt_has_prefix_then_suffix_then_middle(
    kind: str, names: tuple[str, str, str], tmp_path: Path
) -> None:
    rust = KINDS[kind][0]()
    rust.add_special_tokens(list(names))
    tokenizer = Tokenizer.load(save(rust, tmp_path))
    (read,) = _read(tokenizer, prompts=["the fox"], suffix=" to the moon")
    start, middle, end = map(rust.token_to_id, names)
    before, behind = tokenizer.encode_many(["the fox", " to the moon"])
    begin = [tokenizer.bos_id] if kind == "llama3" else []
    assert list(read.ids) == [*begin, start, *before, middle, *behind, end]
    assert read.text == "the fox"


def test_invalid_infill_requests_are_refused(tmp_path: Path) -> None:
    plain = Tokenizer.load(save(KINDS["gpt2"][0](), tmp_path))
    assert infill_tokens(plain) is None
    with pytest.raises(InvalidRequest, match="no fill-in-the-middle"):
        _read(plain, prompts=["a"], suffix="b")
    rust = KINDS["gpt2"][0]()
    rust.add_special_tokens(list(NAMES[0]))
    able = Tokenizer.load(save(rust, tmp_path))
    with pytest.raises(InvalidRequest, match="text, not of token ids"):
        _read(able, prompts=[[5]], suffix="b")
    with pytest.raises(InvalidRequest, match="cannot be combined"):
        _read(able, prompts=["a"], suffix="b", truncate_prompt_tokens=5)
    with pytest.raises(InvalidRequest, match="at most 512"):
        _read(able, prompts=["a"], suffix="b" * 2000)


@pytest.mark.slow
def test_served_model_fills_in_the_middle(tmp_path: Path) -> None:
    weights = tiny_weights(tmp_path / "tiny", vocab_size=323)
    rust = RustTokenizer.from_file(str(weights / "tokenizer.json"))
    rust.add_special_tokens(list(NAMES[0]))
    (weights / "tokenizer.json").write_text(rust.to_str())
    with running_server(tmp_path, weights) as server:
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["has_infill"] is True
        body = {"prompt": "the fox", "suffix": " moon", "max_tokens": 5, "seed": 1, "stream": False, "echo": True}
        response = httpx.post(f"{server.url}/complete", json=body).json()
        assert response["choices"][0]["text"].startswith("the fox")
        assert len(response["receipt"]["suffix_sha256"]) == 64
        ids = Tokenizer.load(weights).encode_many(["the fox", " moon"])
        assert response["usage"]["prompt_tokens"] == len(ids[0]) + len(ids[1]) + 3


@pytest.mark.parametrize("text", ["Once upon a time there was a fox. ", "a", "\u00e9\u4e2d ", "  \n", "x1 y22,"])
@pytest.mark.parametrize("limit", [1, 10, 300])
def test_truncated_long_prompt_equals_the_end_of_the_full_encoding(weights: Path, text: str, limit: int) -> None:
    tokenizer = Tokenizer.load(weights)
    prompt = text * (40_000 // len(text))
    (read,) = _read(tokenizer, prompts=[prompt], truncate_prompt_tokens=limit)
    assert read.truncated and len(read.ids) == limit
    assert prompt.encode().endswith(b"".join(tokenizer.iter_with_specials(read.ids)))
    if " " in text:
        assert list(read.ids) == tokenizer.encode(prompt)[-limit:]
