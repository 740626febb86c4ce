"""The tokenizer: text there and back, exact bytes, and files that are no tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import TEXT, VOCAB

from model.tokenizer import SEPARATOR, Tokenizer, TokenizerError

TOKENIZER = Tokenizer.train([TEXT], VOCAB)
_TEXTS = st.text().filter(lambda text: not any(0xD800 <= ord(c) < 0xE000 for c in text) and SEPARATOR not in text)


@given(_TEXTS)
def test_every_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert b"".join(TOKENIZER.bytes_of[token] for token in ids) == text.encode()


@given(_TEXTS | st.text(alphabet="ab e\U0001f98a", max_size=200) | st.just(SEPARATOR * 9) | st.just(TEXT))
def test_the_lower_bound_is_one(text: str) -> None:
    assert TOKENIZER.least_tokens(text) <= len(TOKENIZER.encode(text))
    assert TOKENIZER.least_tokens("x" * 10_000) > 100


def test_the_separator_is_token_zero_and_has_no_text() -> None:
    assert TOKENIZER.eos_id == 0
    assert TOKENIZER.bytes_of[0] == b""
    assert TOKENIZER.encode(SEPARATOR) == [0]
    assert len(TOKENIZER.bytes_of) == VOCAB


def test_what_is_saved_loads_and_encodes_alike(tmp_path: Path) -> None:
    for name, content in TOKENIZER.files().items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode(TEXT) == TOKENIZER.encode(TEXT)
    assert loaded.eos_id == 0


def test_a_vocabulary_larger_than_the_text_supports_is_refused_with_the_size_that_fits() -> None:
    with pytest.raises(TokenizerError, match="supports only"):
        Tokenizer.train(["too short"], 4096)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"truncation": {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}},
    ],
)
def test_the_lower_bound_says_nothing_where_text_may_get_lost(tmp_path: Path, change: dict[str, object]) -> None:
    raw = json.loads(TOKENIZER.files()["tokenizer.json"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw | change))
    loaded = Tokenizer.load(tmp_path)
    text = " " * 10_000
    assert loaded.least_tokens(text) <= len(loaded.encode(text)) < TOKENIZER.least_tokens(text)


def test_an_added_token_is_shown_as_it_is_written(tmp_path: Path) -> None:
    raw = json.loads(TOKENIZER.files()["tokenizer.json"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    raw["added_tokens"].append({"id": VOCAB, "content": "caf\u00e9!\u4e2d", **flags})
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.decode(loaded.encode("a caf\u00e9!\u4e2d b")) == "a caf\u00e9!\u4e2d b"


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[]", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_a_broken_file_is_named_in_one_line(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    raw = json.loads(TOKENIZER.files()["tokenizer.json"])
    raw["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(TokenizerError, match="byte-level"):
        Tokenizer.load(tmp_path)
