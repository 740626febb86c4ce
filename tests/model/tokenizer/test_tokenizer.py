"""The tokenizer: round trips, exact bytes, and invalid files."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from model.tokenizer.tokenizer import SEPARATOR, Tokenizer, TokenizerError
from tests.support.model.sample_tokenizers import save
from tests.support.model.tiny_models import TEXT, VOCAB

TOKENIZER = Tokenizer.train([TEXT], VOCAB)
TOKENIZER_FILE = tokenizers.Tokenizer.from_str(TOKENIZER.files()["tokenizer.json"])
BYTEWISE = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
MARKED = {"continuing_subword_prefix": "##"}
START, TEXT_ITSELF = {"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
X = {"id": "x", "ids": [0], "tokens": ["x"]}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_TEXTS = st.text().filter(lambda text: not any(0xD800 <= ord(c) < 0xE000 for c in text) and SEPARATOR not in text)


@given(_TEXTS)
def test_every_text_round_trips(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert b"".join(TOKENIZER.bytes_of[token] for token in ids) == text.encode()


def test_vocabulary_too_large_for_the_text_is_refused_with_the_largest_size() -> None:
    with pytest.raises(TokenizerError, match="supports only"):
        Tokenizer.train(["too short"], 4096)
    assert (TOKENIZER.eos_id, TOKENIZER.encode(SEPARATOR), TOKENIZER.bytes_of[0]) == (0, [0], b"")
    assert len(TOKENIZER.bytes_of) == VOCAB


STRIPPED = {"type": "Strip", "strip_left": True, "strip_right": True}
CUT_AWAY = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, {"type": "ByteLevel", **BYTEWISE}]}
FLAGS = {"single_word": False, "lstrip": True, "rstrip": False, "normalized": False, "special": True}


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": STRIPPED},
        {"pre_tokenizer": CUT_AWAY},
        {"added_tokens": [{"id": 0, "content": SEPARATOR, **FLAGS}]},
        {"pre_tokenizer": None},
    ],
)
def test_lower_bound_is_valid_even_if_text_may_get_lost(tmp_path: Path, change: dict[str, Any]) -> None:
    loaded = Tokenizer.load(save(TOKENIZER_FILE, tmp_path, change))
    text = " " * 10_000 + SEPARATOR
    assert loaded.least_tokens(text) <= len(loaded.encode(text)) < TOKENIZER.least_tokens(text)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[]", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_broken_file_is_named_in_one_line(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("decoder", {"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"),
    ("decoder", {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}, "CTC"),
    ("decoder", {"type": "Sequence", "decoders": [{"type": "ByteLevel", **BYTEWISE}, STRIP]}, "Strip"),
    ("decoder", None, "without a decoder"),
    ("model", {"end_of_word_suffix": "</w>"}, "</w>"),
    ("model", {"type": "WordPiece", "unk_token": "!", "max_input_chars_per_word": 9, **MARKED}, "WordPiece"),
    ("model", {"type": "WordLevel", "unk_token": "<none>"}, "UNK"),
    ("model", {"vocab": {"a": 0}, "merges": [], "unk_token": "<none>"}, "<none>"),
    ("model", {"vocab": {"a": 0, "b": 0}, "merges": []}, "two tokens have the same id"),
    ("model", {"vocab": {"a": 2**32 - 1}, "merges": []}, "4294967295"),
    ("model", {"vocab": {}, "merges": []}, "empty"),
    ("model", {"vocab": {"a": 2**32}, "merges": []}, "ids must be from 0"),
    ("model", {"continuing_subword_prefix": "far longer than any piece"}, "invalid tokenizer"),
    ("post_processor", {"single": [START, TEXT_ITSELF], "special_tokens": {}}, "no entry"),
    ("post_processor", {"single": [START], "special_tokens": {"x": X}}, "does not keep the text"),
    ("post_processor", {"single": [START, TEXT_ITSELF], "special_tokens": {"x": X | {"ids": [999]}}}, "id 999"),
]


@pytest.mark.parametrize(("part", "change", "reason"), REFUSED)
def test_unsupported_tokenizers_are_refused_with_the_reason(
    tmp_path: Path, part: str, change: dict[str, Any] | None, reason: str
) -> None:
    raw = json.loads(TOKENIZER.files()["tokenizer.json"])
    if part == "model" and change:
        raw["added_tokens"] = []
        change = raw["model"] | change
    if part == "post_processor" and change:
        change = {"type": "TemplateProcessing", "pair": [TEXT_ITSELF], **change}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw | {part: change}))
    with pytest.raises(TokenizerError, match=reason) as caught:
        Tokenizer.load(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'tokenizer.json'}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("last", [2**22 - 1, 400])
def test_ids_may_have_gaps_and_the_size_counts_them(tmp_path: Path, last: int) -> None:
    raw = json.loads(TOKENIZER.files()["tokenizer.json"])
    raw["model"]["vocab"]["zzzz"] = last
    loaded = Tokenizer.load(save(TOKENIZER_FILE, tmp_path, raw))
    assert loaded.vocab_size == len(loaded.bytes_of) == last + 1
    assert (loaded.bytes_of[last], loaded.bytes_of[last - 1], loaded.token_bytes(last + 1)) == (b"zzzz", b"", b"")


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """The event loop is one such thread. Positive control: the library's own encode(), which holds the GIL."""
    text = TEXT * 60

    def turns(work: Callable[[], object]) -> int:
        started, count = threading.Event(), 0
        thread = threading.Thread(target=lambda: (started.set(), work()))
        thread.start()
        started.wait()
        while thread.is_alive():
            time.sleep(0.001)
            count += 1
        return count

    assert turns(lambda: TOKENIZER.encode(text)) > 10
    assert turns(lambda: TOKENIZER.encode_spans(text)) > 10
    assert turns(lambda: TOKENIZER_FILE.encode(text)) < 10


def test_stored_truncation_padding_and_dropout_are_ignored(tmp_path: Path) -> None:
    cut = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 10**6}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    model = json.loads(TOKENIZER.files()["tokenizer.json"])["model"] | {"dropout": 0.9}
    change = {"model": model, "truncation": cut, "padding": pad | {"pad_type_id": 0, "pad_token": "!"}}
    loaded = Tokenizer.load(save(TOKENIZER_FILE, tmp_path, change))
    assert loaded.encode(TEXT) == loaded.encode(TEXT) == TOKENIZER.encode(TEXT)


def test_normalizer_that_fills_the_memory_is_refused(tmp_path: Path) -> None:
    raw = json.loads(TOKENIZER.files()["tokenizer.json"])
    grow = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw | {"normalizer": _sequence([grow, grow])}))
    assert Tokenizer.load(tmp_path).encode("a") == TOKENIZER.encode("a" * 100)
    everywhere = {"type": "Replace", "pattern": {"Regex": "(?=a)"}, "content": "a"}
    nested = _sequence([grow, _sequence([grow, grow])])
    bombs = {
        "nested": {"normalizer": nested},
        "behind a pattern": {"normalizer": nested | {"pattern": {"String": "a"}, "content": "a"}},
        "matching nothing": {"normalizer": _sequence([everywhere] * 10)},
        "in front": {"normalizer": {"type": "Prepend", "prepend": "a" * 100_000}},
        "decoder": {"decoder": {"type": "Sequence", "decoders": [grow] * 3}},
    }
    for bomb in bombs.values():
        (tmp_path / "tokenizer.json").write_text(json.dumps(raw | bomb))
        with pytest.raises(TokenizerError, match=r"(normalizer|decoder) can make text \d+ times as long"):
            Tokenizer.load(tmp_path)


def _sequence(steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": steps}
