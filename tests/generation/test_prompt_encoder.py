"""Prompt encoder: fill-in-the-middle, and truncation that reads only the end of a long prompt."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as RustTokenizer

from app.access.worker_turns import WorkAccount
from app.common.errors import InvalidRequest
from app.common.ipc import Ready
from app.common.model_version import Version
from app.generation.engine_requests import BuiltRequests
from app.generation.prompt_encoder import EncodedPrompt, PromptEncoder
from app.generation.request import GenerationRequest
from app.tokenization.text_encoder import TextEncoder
from app.tokenization.tokenizer_pool import TokenizerPool
from model.tokenizer.infill import infill_tokens
from model.tokenizer.tokenizer import Tokenizer
from tests.support.model.sample_tokenizers import KINDS, save
from tests.support.model.tiny_models import tiny_weights
from tests.support.servers import running_server

NAMES = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
READY: dict[str, Any] = {
    "context": 512, "vocab_size": 400, "n_params": 1, "dtype": "float32", "device": "cpu",
    "eos_ids": (), "start_id": 0, "sampling_defaults": {}, "blocks_total": 1, "block_size": 16, "has_encoder": False,
    "numerics": "torch", "numerics_reason": "", "waits_for_build": False, "model_version": Version(""),
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


PSM, SPM, WITHOUT_MIDDLE = "PSM", "SPM", "without middle"
FAMILIES = {
    "Qwen, CodeGemma": (PSM, ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ["<|file_sep|>", "<|im_end|>"]),
    "StarCoder": (PSM, ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), ["<file_sep>", "<fim_pad>"]),
    "SantaCoder": (PSM, ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), ["<fim-pad>"]),
    "Code Llama": (PSM, ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"), ["\u2581<EOT>"]),
    "DeepSeek": (
        PSM,
        ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
        ["<|EOT|>"],
    ),
    "Seed Coder": (SPM, ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"), ["<[end\u2581of\u2581sentence]>"]),
    "Codestral": (WITHOUT_MIDDLE, ("[PREFIX]", "[SUFFIX]"), ["[MIDDLE]"]),
}


def _with_infill(kind: str, family: str, folder: Path, *, special: bool = True) -> tuple[Tokenizer, RustTokenizer]:
    rust = KINDS[kind][0]()
    _, names, ends = FAMILIES[family]
    rust.add_tokens([AddedToken(name, special=special, normalized=False) for name in (*names, *ends)])
    return Tokenizer.load(save(rust, folder)), rust


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["gpt2", "llama3", "prefixed", "llama2", "mistral", "gemma", "unigram"])
def test_infill_prompt_has_its_parts_in_the_family_s_order(
    kind: str, family: str, special: bool, tmp_path: Path
) -> None:
    tokenizer, rust = _with_infill(kind, family, tmp_path, special=special)
    (read,) = _read(tokenizer, prompts=["the fox"], suffix="to the moon")
    order, names, _ = FAMILIES[family]
    tokens = [rust.token_to_id(name) for name in names]
    prefix = tokenizer.encode_many(["the fox"])[0]
    sentinel = "\n"
    # As Code Llama encodes a suffix: behind a character, whose tokens are dropped.
    before = len(tokenizer.encode_many([sentinel])[0])
    suffix = tokenizer.encode_many([f"{sentinel}to the moon"])[0][before:] if kind != "unigram" else None
    begin = [tokenizer.bos_id] if tokenizer.adds_bos else []
    if suffix is None:
        suffix = list(read.ids[read.ids.index(tokens[1]) + 1 :])
        suffix = suffix[: suffix.index(tokens[2] if order == PSM else tokens[0])]
    start, hole, *middle = tokens
    if order == PSM:
        assert list(read.ids) == [*begin, start, *prefix, hole, *suffix, *middle]
    else:
        assert list(read.ids) == [*begin, hole, *suffix, start, *prefix, *middle]
    assert b"".join(map(tokenizer.token_bytes, suffix)) == b"to the moon", "no space comes before the suffix"
    assert read.text == "the fox"


@pytest.mark.parametrize("kind", ["gpt2", "llama2", "mistral", "gemma"])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_special_tokens_in_the_parts_of_an_infill_prompt_stay_text(
    kind: str, family: str, tmp_path: Path
) -> None:
    tokenizer, rust = _with_infill(kind, family, tmp_path, special=False)
    _, names, _ = FAMILIES[family]
    marks = "<s>" if kind != "gpt2" else "<|end|>"
    (read,) = _read(tokenizer, prompts=[f"x {''.join(names)}"], suffix=f"{names[0]} y {marks}")
    for name in names:
        assert read.ids.count(rust.token_to_id(name)) == 1
    assert read.ids.count(tokenizer.bos_id) <= (1 if tokenizer.adds_bos else 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_middle_ends_at_the_tokens_of_its_family(family: str, tmp_path: Path) -> None:
    tokenizer, rust = _with_infill("llama2", family, tmp_path)
    _, names, ends = FAMILIES[family]

    def stop_ids(**fields: Any) -> tuple[int, ...]:
        request = GenerationRequest(prompts=["a"], **fields)
        built = BuiltRequests("r", request, Ready(**READY), tokenizer, "")
        return built.requests(_read(tokenizer, prompts=["a"]), ())[0].stop_ids

    found = {rust.token_to_id(name) for name in (*names, *ends)}
    assert found <= set(stop_ids(suffix="b"))
    assert not found & set(stop_ids())
    assert stop_ids(suffix="b", ignore_eos=True) == ()


def test_echo_of_an_infill_prompt_places_the_prefix_in_the_text(tmp_path: Path) -> None:
    tokenizer, _ = _with_infill("llama2", "Code Llama", tmp_path)
    (read,) = _read(tokenizer, prompts=["the fox"], suffix="moon", echo=True, logprobs=0)
    assert read.starts is not None and len(read.starts) == len(read.ids)
    assert read.starts[1] == 0 and read.starts[-1] == len("the fox") and list(read.starts) == sorted(read.starts)


def test_a_chat_gets_the_tokens_of_its_template_alone(tmp_path: Path) -> None:
    rust = KINDS["llama2"][0]()
    ends = [("<s>", 1), ("</s>", 2)]
    rust.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    tokenizer = Tokenizer.load(save(rust, tmp_path))
    for text in ("<s> the fox", "the fox</s>the"):
        (read,) = _read(tokenizer, prompts=[text], is_chat=True)
        assert list(read.ids) == rust.encode(text, add_special_tokens=False).ids


def test_a_chat_ends_at_every_end_token_that_a_file_names(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(KINDS["llama2"][0](), tmp_path, eos_token="</s>"))
    ready = Ready(**READY | {"eos_ids": (7,), "named_eos_ids": (7, 8)})
    for is_chat, ends in ((True, (7, 8, 2)), (False, (7,))):
        request = GenerationRequest(prompts=["a"], is_chat=is_chat)
        built = BuiltRequests("r", request, ready, tokenizer, "").requests(_read(tokenizer, prompts=["a"]), ())
        assert built[0].stop_ids == ends


def test_invalid_infill_requests_are_refused(tmp_path: Path) -> None:
    plain = Tokenizer.load(save(KINDS["gpt2"][0](), tmp_path))
    assert infill_tokens(plain) is None
    with pytest.raises(InvalidRequest, match="no fill-in-the-middle"):
        _read(plain, prompts=["a"], suffix="b")
    rust = KINDS["gpt2"][0]()
    rust.add_special_tokens(list(NAMES))
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
    rust.add_special_tokens(list(NAMES))
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
