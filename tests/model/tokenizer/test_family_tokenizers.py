"""Tokenizers of the model families on a megabyte of mixed text: bytes, streamed text, spans, added tokens."""

from __future__ import annotations

import functools
import itertools
import random
import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from app.common.types import Request, SampledEvent
from app.generation.detokenizer import OutputChoice, TextRules
from model.tokenizer.tokenizer import Tokenizer
from tests.support.mixed_text import mixed_texts
from tests.support.model.family_tokenizers import FAMILY_TOKENIZERS, pattern_of
from tests.support.model.sample_tokenizers import save

_SIZE, _SPANS_SIZE, _ADDED_SIZE = 1_000_000, 100_000, 30_000
_FLAGS = [
    dict(zip(("lstrip", "rstrip", "normalized", "single_word"), flags, strict=True))
    for flags in itertools.product((False, True), repeat=4)
]


@functools.cache
def _megabyte() -> list[str]:
    return mixed_texts(_SIZE, 1)


@functools.cache
def _loaded(name: str, *, has_added_tokens: bool = False) -> tuple[Tokenizer, RustTokenizer]:
    """Our tokenizer, and the library's from the same file."""
    rust = FAMILY_TOKENIZERS[name].build()
    if has_added_tokens:
        rust.add_tokens([AddedToken(_added_name(i), special=False, **flags) for i, flags in enumerate(_FLAGS)])
        rust.add_special_tokens([AddedToken(f"<|{i}|>", **flags) for i, flags in enumerate(_FLAGS)])
    with tempfile.TemporaryDirectory() as folder:
        save(rust, Path(folder))
        return Tokenizer.load(Path(folder)), RustTokenizer.from_file(f"{folder}/tokenizer.json")


def _added_name(index: int) -> str:
    return f"[\u4e2d{index}]" if index % 2 == 0 else f"added{index}\u4e2d"


def _streamed(ours: Tokenizer, prompt: Sequence[int], ids: Sequence[int], *, is_plain: bool = True) -> str:
    """The text of a completion, as the service streams it."""
    rules = TextRules() if is_plain else TextRules(stops=("\x00never\x00",), returns_ids=True)
    request = Request(id="r", prompt=tuple(prompt), max_tokens=len(ids))
    choice, parts = OutputChoice(0, request, ours, rules), []
    for index, token in enumerate(ids):
        parts += [delta.text for delta in choice.add(SampledEvent("r", index, token))]
    return "".join([*parts, *(delta.text for delta in choice.finish("length"))])


def _start(ours: Tokenizer) -> list[int]:
    """A prompt without text."""
    return [next(iter(ours.specials))]


@pytest.mark.parametrize("name", FAMILY_TOKENIZERS)
def test_streamed_text_is_the_decoded_whole(name: str) -> None:
    """Each text is streamed in two completions, cut at a random token, which may be inside a character."""
    ours, library = _loaded(name)
    draw, texts = random.Random(2), _megabyte()
    batch = ours.encode_many(texts)
    assert sum(len(text.encode()) for text in texts) >= _SIZE
    for text, ids, decoded in zip(texts, batch, library.decode_batch(batch), strict=True):
        assert b"".join(map(ours.bytes_of.__getitem__, ids)).decode() == FAMILY_TOKENIZERS[name].written(text)
        is_plain, cut = draw.random() < 0.9, draw.randint(1, len(ids))
        whole, begun = ours.decode(ids), ours.decode(ids[:cut])
        if ours.strips_first_space:
            whole, begun = whole.removeprefix(" "), begun.removeprefix(" ")
        assert (decoded.removeprefix(" ") if name == "prefix space" else decoded) == whole
        assert _streamed(ours, _start(ours), ids[:cut], is_plain=is_plain) == begun
        assert _streamed(ours, ids[:cut], ids[cut:], is_plain=is_plain) == ours.decode(ids[cut:])


@pytest.mark.parametrize("name", FAMILY_TOKENIZERS)
def test_tokens_that_make_no_characters_stream_like_the_decoded_whole(name: str) -> None:
    """Random tokens: most pieces of characters are where they make none."""
    ours, _ = _loaded(name)
    draw = random.Random(3)
    partial = [token for token, data in enumerate(ours.bytes_of) if len(data) == 1 and data[0] >= 0x80]
    assert len(partial) >= 128
    ids = draw.choices([*partial, *range(ours.vocab_size)], k=20_000)
    whole = b"".join(map(ours.token_bytes, ids)).decode("utf-8", "replace")
    assert whole.count("\ufffd") > 1000
    assert _streamed(ours, ids[:1], ids) == ours.decode(ids) == whole
    cuts = sorted(draw.sample(range(len(ids)), 50))
    for first, end in itertools.pairwise([0, *cuts, len(ids)]):
        assert _streamed(ours, ids[:1], ids[first:end], is_plain=False) == ours.decode(ids[first:end])


@pytest.mark.parametrize("name", FAMILY_TOKENIZERS)
def test_spans_are_the_characters_of_the_bytes(name: str) -> None:
    (ours, _), kind = _loaded(name), FAMILY_TOKENIZERS[name]
    for text in mixed_texts(_SPANS_SIZE, 4, longest=3000):
        spans = ours.encode_spans(text, add_special_tokens=False).flat()
        last, covered = 0, []
        for token, start, end in zip(spans.ids, spans.starts, spans.ends, strict=True):
            covered.append(text[max(start, last) : end])
            data, written, last = ours.bytes_of[token], text[start:end], end
            if kind.composes:
                if any(map(unicodedata.combining, text[start : end + 1])):
                    continue  # NFC may put marks in another order
                written = unicodedata.normalize("NFC", written)
            if start == 0 and kind.first_space != "none":
                written = " " + written
            is_exact = _is_whole(data) and not written.startswith(" ") and not kind.composes
            assert data == written.encode() if is_exact else data in written.encode()
        assert "".join(covered) == text


def _is_whole(data: bytes) -> bool:
    return data.decode(errors="ignore").encode() == data


@pytest.mark.parametrize("name", FAMILY_TOKENIZERS)
def test_added_tokens_of_all_flags_have_their_bytes_and_spans(name: str) -> None:
    """lstrip, rstrip, normalized and single_word, of tokens that are special and of others."""
    ours, library = _loaded(name, has_added_tokens=True)
    names = [_added_name(i) for i in range(16)] + [f"<|{i}|>" for i in range(16)]
    content_of = {library.token_to_id(content): content for content in names}
    draw, found = random.Random(5), set()
    for base in mixed_texts(_ADDED_SIZE, 6, longest=300):
        around = ("", "", " ", "   ", "\n\t")
        parts = [base[i : i + 40] + draw.choice(around) + draw.choice(names) for i in range(0, len(base), 40)]
        text = "".join(part + draw.choice((*around, "x")) for part in parts)
        spans = ours.encode_spans(text, add_special_tokens=False).flat()
        ids, last = spans.ids.tolist(), 0
        assert ids == library.encode(text, add_special_tokens=False).ids
        for token, start, end in zip(ids, spans.starts, spans.ends, strict=True):
            assert start <= last, "no character is left out"
            last = end
            if (content := content_of.get(token)) is None:
                continue
            found.add(token)
            flags = _FLAGS[names.index(content) % 16]
            before, after = text[start:end].split(content)
            assert not before.strip() and not after.strip()
            assert flags["rstrip"] or not after
            assert flags["lstrip"] or not before or (flags["normalized"] and before == " ")
            written = b"" if content.startswith("<|") else content.encode()
            # The normalizer that puts a space before each part of a text does so with tokens that are searched in it.
            spaced = bool(written) and flags["normalized"] and FAMILY_TOKENIZERS[name].first_space == "always"
            assert ours.bytes_of[token] == (b" " if spaced else b"") + written
        assert last == len(text)
        whole, decoded = ours.decode(ids), library.decode([token for token in ids if token not in ours.specials])
        assert _streamed(ours, ours.encode("fox")[-1:], ids) == whole, "after a prompt with text"
        assert decoded in (whole, whole.removeprefix(" "))
    assert len(found) > 24


def test_every_pattern_of_a_family_is_proven() -> None:
    for family in ("Llama 3", "o200k", "Tekken", "Qwen"):
        assert pattern_of(family)
    assert not any(_loaded(name)[0].unproven for name in FAMILY_TOKENIZERS)
