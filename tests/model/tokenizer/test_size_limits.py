"""A small tokenizer.json that would fill the memory, or end the process, is refused before the library reads it."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from model.tokenizer import tokenizer
from model.tokenizer.size_limits import LONGEST_PIECE
from model.tokenizer.tokenizer import Tokenizer, TokenizerError
from tests.support.model.sample_tokenizers import gpt2, save

BYTEWISE = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
TEXT_ITSELF, X = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "x", "type_id": 0}}

UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["?", 0.0], ["a", -1.0]], "byte_fallback": False}


def charsmap(replacement: str, key: bytes = b"a") -> str:
    """What SentencePiece writes: a double array that finds `key`, and what replaces it."""
    units, position, free = [0] * 2048, 0, 256
    for byte in key:
        units[position] |= (position ^ free) << 10
        position = free ^ byte
        units[position], free = byte, free + 256
    units[position] |= (position ^ free) << 10 | 0x100
    units[free] = 1 << 31
    tree = struct.pack(f"<{len(units)}I", *units)
    return base64.b64encode(struct.pack("<I", len(tree)) + tree + replacement.encode() + b"\0").decode()


def precompiled(replacement: str) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": charsmap(replacement)}


def replace(pattern: str, content: str, **more: Any) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content, **more}


def normalizers(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"normalizer": {"type": "Sequence", "normalizers": steps}}


def pre_tokenizers(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}


def template(pieces: list[dict[str, Any]], n_ids: int) -> dict[str, Any]:
    special = {"x": {"id": "x", "ids": [0] * n_ids, "tokens": ["!"] * n_ids}}
    return {"type": "TemplateProcessing", "single": pieces, "pair": [TEXT_ITSELF], "special_tokens": special}


def processors(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"post_processor": {"type": "Sequence", "processors": steps}}


BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "maps": (normalizers(*[precompiled("a" * 20)] * 2), "normalizer can make text 400 times"),
    "map of ligatures": (normalizers(precompiled("\ufdfa" * 15)), "normalizer can make text 270 times"),
    "map beside a pattern": (normalizers({**replace("b", "b"), **precompiled("a" * 300)}), "text 300 times"),
    "map of no base64": (normalizers({"type": "Precompiled", "precompiled_charsmap": "*"}), "is not base64"),
    "ligatures": (normalizers(*[replace("\u0644", "\ufdfa"), {"type": "NFKC"}] * 2), "text 324 times"),
    "bytes of bytes": (normalizers(*[{"type": "ByteLevel"}] * 5), "normalizer can make text 1024 times"),
    "words of bytes": (pre_tokenizers(*[BYTEWISE] * 5), "pre_tokenizer can make text 1024 times"),
    "empty list": (normalizers(replace("a", "a" * 300, normalizers=[])), "text 300 times"),
    "normalizer steps": (normalizers(*[{"type": "NFC"}] * 64), "normalizer has 65 steps; at most 64"),
    "pre_tokenizer steps": (pre_tokenizers(*[{"type": "Whitespace"}] * 64), "pre_tokenizer has 65 steps"),
    "post_processor steps": (processors(*[BYTEWISE] * 64), "post_processor has 65 steps"),
    "special tokens": ({"post_processor": template([*[X] * 40, TEXT_ITSELF], 40)}, "can add 1600 tokens; at most 1024"),
    "one after another": (processors(*[template([X, TEXT_ITSELF], 50)] * 40), "can add 2000 tokens"),
    "text twice": (processors(*[template([TEXT_ITSELF] * 2, 1)] * 40), r"can add \d+ tokens"),
    "decoder": ({"decoder": {"type": "Sequence", "decoders": [replace("a", "a" * 20)]}}, "decoder can make text 20 "),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_file_that_asks_for_gigabytes_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    change, words = BOMBS[kind]
    with pytest.raises(TokenizerError, match=rf"tokenizer\.json: the .*{words}") as caught:
        Tokenizer.load(save(gpt2(), tmp_path, change))
    assert str(caught.value).isprintable()


MODEST: dict[str, tuple[dict[str, Any], int]] = {
    "map": (normalizers(precompiled("b" * 20), {"type": "NFKC"}), 20),
    "ligature": (normalizers(replace("a", "\ufdfa"), {"type": "NFKC"}), 27),  # its letters are two bytes each
    "special tokens": ({"post_processor": template([X, X, TEXT_ITSELF], 512)}, 1024),
    "no merges": ({"model": UNIGRAM | {"merges": None}, "added_tokens": []}, 1),
}


@pytest.mark.parametrize("kind", MODEST)
def test_file_within_the_limits_is_read(tmp_path: Path, kind: str) -> None:
    """The map works, too: a bomb of such maps would have worked."""
    change, n_tokens = MODEST[kind]
    assert len(Tokenizer.load(save(gpt2(), tmp_path, change)).encode("a")) >= n_tokens


@pytest.mark.parametrize("where", ["vocab", "unigram", "added"])
def test_endless_token_is_refused(tmp_path: Path, where: str) -> None:
    """The library frees a Unigram vocabulary by recursion: pieces of 250,000 characters were a segmentation fault."""
    raw = json.loads(gpt2().to_str())
    for length, is_refused in [(LONGEST_PIECE, False), (LONGEST_PIECE + 1, True)]:
        piece = "a" * length
        unigram = {"type": "Unigram", "unk_id": 0, "vocab": [["?", 0.0], [piece, -1.0]], "byte_fallback": False}
        fields = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        change = {
            "vocab": {"model": {**raw["model"], "vocab": {**raw["model"]["vocab"], piece: 320}}},
            "unigram": {"model": unigram, "added_tokens": []},
            "added": {"added_tokens": [*raw["added_tokens"], {"id": 320, "content": piece, **fields}]},
        }[where]
        directory = save(gpt2(), tmp_path, change)
        if not is_refused:
            assert Tokenizer.load(directory).vocab_size
            continue
        with pytest.raises(TokenizerError, match=rf"a token has {length} characters; at most {LONGEST_PIECE}"):
            Tokenizer.load(directory)


@pytest.mark.parametrize("where", ["vocab", "merges", "added"])
def test_millions_of_entries_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """With 3 million tokens a reload blocked the event loop for 5.4 s at a time."""
    raw = json.loads(gpt2().to_str())
    most = len(raw["model"]["vocab"]) + len(raw["model"]["merges"]) + len(raw["added_tokens"])
    monkeypatch.setattr(tokenizer, "MAX_ENTRIES", most)
    assert Tokenizer.load(save(gpt2(), tmp_path)).vocab_size
    raw["model"]["vocab"] |= {"zzzz": 320} if where == "vocab" else {}
    raw["model"]["merges"] += raw["model"]["merges"][:1] if where == "merges" else []
    raw["added_tokens"] += raw["added_tokens"][:1] if where == "added" else []
    with pytest.raises(TokenizerError, match=f"has {most + 1} tokens and merges; at most {most} are allowed"):
        Tokenizer.load(save(gpt2(), tmp_path, raw))


def test_training_makes_no_token_beyond_the_limit() -> None:
    """Merges double the length of a text that repeats one letter."""
    trained = Tokenizer.train(["a" * 40_000] * 2, 280, fewer=True)
    assert LONGEST_PIECE // 2 < max(map(len, trained.bytes_of)) <= LONGEST_PIECE
