"""Echo with log-probabilities: a prompt token begins where POST /tokenize says, and events have their tokens' text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from app.access.worker_turns import WorkAccount
from app.api.openai.responder import split_by_token
from app.common.ipc import Ready
from app.common.model_version import Version
from app.common.types import PromptScores
from app.generation.detokenizer import PromptEcho
from app.generation.prompt_encoder import EncodedPrompt, PromptEncoder
from app.generation.request import Delta, GenerationRequest
from app.tokenization.text_encoder import TextEncoder
from app.tokenization.tokenizer_pool import TokenizerPool
from model.tokenizer.tokenizer import Tokenizer
from tests.support.model.sample_tokenizers import KINDS, gpt2, llama2, mistral, save, unigram
from tests.support.model.tiny_models import tiny_weights
from tests.support.servers import running_server

READY: dict[str, Any] = {
    "context": 4096, "vocab_size": 4096, "n_params": 1, "dtype": "float32", "device": "cpu",
    "eos_ids": (), "start_id": 0, "sampling_defaults": {}, "blocks_total": 1, "block_size": 16, "has_encoder": False,
    "numerics": "torch", "numerics_reason": "", "waits_for_build": False, "model_version": Version(""),
}  # fmt: skip


def _with(base: Callable[[], RustTokenizer], **parts: Any) -> RustTokenizer:
    rust = base()
    for name, part in parts.items():
        setattr(rust, name, part)
    return rust


def _marked(base: Callable[[], RustTokenizer]) -> RustTokenizer:
    rust = base()
    rust.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<mask>", lstrip=True)])
    rust.add_special_tokens([AddedToken("<sep>", rstrip=True), AddedToken("<both>", lstrip=True, rstrip=True)])
    rust.add_tokens([AddedToken("fox!", normalized=True), AddedToken("word", single_word=True)])
    return rust


BYTES = pre_tokenizers.ByteLevel
VARIANTS: dict[str, Callable[[], RustTokenizer]] = {
    **{name: builder for name, (builder, _) in KINDS.items()},
    **{f"{name} with added tokens": lambda name=name: _marked(KINDS[name][0]) for name in KINDS},
    "lowercase": lambda: _with(gpt2, normalizer=normalizers.Lowercase()),
    "strip accents": lambda: _with(
        gpt2, normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    ),
    "strip": lambda: _with(gpt2, normalizer=normalizers.Strip()),
    "NFKC": lambda: _with(gpt2, normalizer=normalizers.NFKC()),
    "prepend text": lambda: _with(gpt2, normalizer=normalizers.Prepend("ab ")),
    "replace": lambda: _with(gpt2, normalizer=normalizers.Replace(Regex(" +"), " ")),
    "remove": lambda: _with(gpt2, normalizer=normalizers.Replace("e", "")),
    "bert": lambda: _with(gpt2, normalizer=normalizers.BertNormalizer()),
    "trimmed offsets": lambda: _with(gpt2, post_processor=processors.ByteLevel(trim_offsets=True)),
    "space and trimmed offsets": lambda: _with(
        gpt2, pre_tokenizer=BYTES(add_prefix_space=True), post_processor=processors.ByteLevel(trim_offsets=True)
    ),
    "metaspace always": lambda: _with(mistral, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always")),
    "metaspace never": lambda: _with(mistral, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="never")),
    "unigram lowercase": lambda: _with(unigram, normalizer=normalizers.Lowercase()),
    "end added": lambda: _with(
        llama2,
        post_processor=processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]),
    ),
}


@cache
def _tokenizer(kind: str) -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer.load(save(VARIANTS[kind](), Path(folder)))


def _encoded(tokenizer: Tokenizer, **fields: Any) -> list[EncodedPrompt]:
    pool = TokenizerPool()
    try:
        encoder = PromptEncoder(Ready(**READY), TextEncoder(tokenizer), pool, WorkAccount())
        return asyncio.run(encoder.encode_prompts(GenerationRequest(echo=True, logprobs=0, **fields)))
    finally:
        pool.close()


def _deltas(tokenizer: Tokenizer, prompt: EncodedPrompt) -> list[Delta]:
    echo = PromptEcho(prompt.text, prompt.ids, tokenizer, is_scored=True, starts=prompt.starts)
    echo.add(PromptScores("r", 1, tuple((-1.0, ()) for _ in prompt.ids[1:])))
    return echo.deltas(0)


def _check_events(deltas: list[Delta], text: str) -> None:
    """The events' texts add up to the text, and each has the text from its first token to the next event's."""
    assert "".join(delta.text for delta in deltas) == text
    parts = [part for delta in deltas for part in split_by_token(delta)]
    assert "".join(part.text for part in parts) == text
    offsets = [detail.offset for part in parts for detail in part.tokens]
    assert max(offsets) <= len(text)
    if offsets == sorted(offsets):
        firsts = [0, *(part.tokens[0].offset for part in parts[1:]), len(text)]
        # A token without text of its own is sent with its successor.
        assert [part.text for part in parts] == [text[a:b] for a, b in pairwise(firsts)]


CHAT = "<|im_start|>user\nhi there <mask> my <sep> friend<both>fox! word <|im_start|>"
TEXTS = [
    "the fox answered the moon", "  the fox ", "", " ", "Cafe\u0301 \u00c5ngstr\u00f6m \ufb01ne \u2167",
    "\U0001f98a the\u4e2d fox", CHAT, "the fox\n\n\tanswered <s> </s> x" * 40, "\u0130stanbul THE FOX", "\0a\u200bb",
]  # fmt: skip


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize("text", TEXTS)
def test_prompt_tokens_begin_where_tokenize_says(kind: str, text: str) -> None:
    _check(kind, text)


@pytest.mark.parametrize("kind", VARIANTS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.sampled_from([*" afoxT\n\u00e9\u0301\U0001f98a\u4e2d\ufb01", "<mask>", "<sep>", "the fox"])))
def test_prompt_tokens_of_random_texts_begin_where_tokenize_says(kind: str, parts: list[str]) -> None:
    _check(kind, "".join(parts))


def _check(kind: str, text: str) -> None:
    tokenizer = _tokenizer(kind)
    (prompt,) = _encoded(tokenizer, prompts=[text])
    spans = list(tokenizer.encode_spans(text))
    deltas = _deltas(tokenizer, prompt)
    if spans:
        assert list(prompt.ids) == [token for token, _, _ in spans] == tokenizer.encode(text)
        offsets = [detail.offset for delta in deltas for detail in delta.tokens]
        assert offsets == [start for _, start, _ in spans]
    assert prompt.text == text
    _check_events(deltas, text)


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize("limit", [None, 3])
def test_echo_of_ids_and_of_truncated_prompts_agrees_with_its_own_text(kind: str, limit: int | None) -> None:
    tokenizer = _tokenizer(kind)
    ids = tokenizer.encode("the fox \U0001f98a answered<mask> the moon")
    for given_prompt in (ids, "the fox answered the moon and the sun"):
        if isinstance(given_prompt, str) and limit is None:
            continue
        (prompt,) = _encoded(tokenizer, prompts=[given_prompt], truncate_prompt_tokens=limit)
        deltas = _deltas(tokenizer, prompt)
        _check_events(deltas, prompt.text)
        for token, detail in zip(prompt.ids, (d for delta in deltas for d in delta.tokens), strict=True):
            own = tokenizer.token_bytes(token)
            if own == own.decode("utf-8", "ignore").encode():
                assert prompt.text.startswith(own.decode(), detail.offset)


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_limit_that_the_prompt_does_not_reach_changes_no_position(kind: str) -> None:
    tokenizer = _tokenizer(kind)
    for text in ("the fox answered the moon", CHAT, "Cafe\u0301 <mask> fox"):
        ids = tokenizer.encode(text)
        for limit in (len(ids), 1000):
            (prompt,) = _encoded(tokenizer, prompts=[text], truncate_prompt_tokens=limit)
            offsets = [detail.offset for delta in _deltas(tokenizer, prompt) for detail in delta.tokens]
            assert list(prompt.ids) == ids and prompt.text == text
            assert offsets == [start for _, start, _ in tokenizer.encode_spans(text)]


@pytest.mark.parametrize("kind", VARIANTS)
def test_the_first_token_of_a_continuation_is_the_first_at_or_after_the_context(kind: str) -> None:
    """lm-eval's rule."""
    tokenizer = _tokenizer(kind)
    context, continuation = "the fox answered", " the moon"
    (prompt,) = _encoded(tokenizer, prompts=[context + continuation])
    offsets = [detail.offset for delta in _deltas(tokenizer, prompt) for detail in delta.tokens]
    (alone,) = _encoded(tokenizer, prompts=[context])
    if prompt.ids[: len(alone.ids)] == alone.ids:  # otherwise a token covers both
        first = next((i for i, offset in enumerate(offsets) if offset >= len(context)), len(offsets))
        assert first == len(alone.ids)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama2", "qwen"])
def test_both_endpoints_and_both_modes_place_tokens_as_tokenize_does(kind: str, tmp_path: Path) -> None:
    weights = tiny_weights(tmp_path / "tiny", vocab_size=512)
    save(_marked(KINDS[kind][0]), weights)
    with running_server(tmp_path, weights) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        texts = ["the fox answered", "Cafe\u0301 <mask> the fox<sep> x <|im_start|>y"]
        starts = [[p["start"] for p in client.post("/tokenize", json={"prompt": t}).json()["pieces"]] for t in texts]
        body = {"prompt": texts, "max_tokens": 2, "n": 2, "echo": True, "logprobs": 1, "ignore_eos": True}
        choices = client.post("/v1/completions", json=body).json()["choices"]
        for choice in choices:
            text, start = texts[choice["index"] // 2], starts[choice["index"] // 2]
            assert choice["text"].startswith(text)
            assert choice["logprobs"]["text_offset"][: len(start)] == start
            assert choice["logprobs"]["text_offset"][len(start)] == len(text)
        offsets: dict[int, list[int]] = {}
        streamed: dict[int, str] = {}
        for line in client.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n"):
            for choice in [] if "[DONE]" in line or not line else httpx.Response(200, text=line[6:]).json()["choices"]:
                streamed[choice["index"]] = streamed.get(choice["index"], "") + choice["text"]
                offsets.setdefault(choice["index"], []).extend((choice["logprobs"] or {}).get("text_offset", []))
        for index, text in streamed.items():
            assert text.startswith(texts[index // 2])
            assert offsets[index][: len(starts[index // 2])] == starts[index // 2]
        native = client.post("/complete", json={**body, "stream": False}).json()["choices"]
        assert all(choice["text"].startswith(texts[choice["index"] // 2]) for choice in native)
