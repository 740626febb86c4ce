"""Exact bytes of the tokens of a tokenizer.json, and whether text can get lost.

Three ways of writing text into pieces are known:
    byte-level      "\\u0120fox"     every character stands for one byte (GPT-2, llama 3, Qwen)
    SentencePiece   "\\u2581fox"     U+2581 stands for a space, <0x0A> for a byte (llama 2, mistral, gemma, Unigram)
    words           "fox"         the space before a word is not written
`raw` is everywhere the content of the file as the tokenizers package writes it: complete, each step with its type.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

_SUPPORTED = "byte-level, SentencePiece-style and word-level tokenizers are"
_MODELS = {"BPE": "BPE", "Unigram": "Unigram", "WordLevel": "word-level"}
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_KEEP = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
"""Ways to cut a text at a pattern that remove nothing of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """How the pieces of one tokenizer write bytes."""

    kind: str
    """For people: what sort of tokenizer this is."""
    byte_level: bool = False
    byte_fallback: bool = False
    replaced: tuple[tuple[str, str], ...] = ()
    """(what stands in a piece, what it stands for)"""
    before: str = ""
    """Text before every piece that the piece does not write."""

    def bytes_of(self, piece: str) -> bytes:
        """The bytes that `piece` of the model's vocabulary stands for."""
        if self.byte_level and all(character in BYTE_ALPHABET for character in piece):
            return bytes(BYTE_ALPHABET[character] for character in piece)
        if self.byte_fallback and _BYTE_PIECE.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        for written, meant in self.replaced:
            piece = piece.replace(written, meant)
        return (self.before + piece).encode()

    def bytes_of_added(self, content: str) -> bytes:
        """The bytes of a token that was added to the vocabulary; byte-level tokenizers store these as plain text."""
        return content.encode() if self.byte_level else self.bytes_of(content)


def pieces_of(raw: dict[str, Any]) -> Pieces:
    """Reads the decoder. Raises ValueError if the exact bytes of a token cannot be determined."""
    model, decoder = raw["model"], raw["decoder"]
    if model["type"] not in _MODELS:
        raise ValueError(f"{model['type']} tokenizers are not supported, {_SUPPORTED}")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise ValueError(f"marks inside or at the end of words (##, </w>) are not supported, {_SUPPORTED}")
    if decoder is None:
        return _words(raw)
    name, kinds = _MODELS[model["type"]], [step["type"] for step in _steps(decoder)]
    if "ByteLevel" in kinds:
        if unknown := set(kinds) - {"ByteLevel", "Fuse"}:
            raise ValueError(f"a byte-level decoder with {min(unknown)} is not supported")
        return Pieces(kind=f"byte-level {name}", byte_level=True)
    replaced = _replaced(_steps(decoder))
    fallback = "ByteFallback" in kinds or model.get("byte_fallback") is True
    style = "SentencePiece-style " if replaced and name == "BPE" else ""
    return Pieces(
        kind=f"{style}{name}{' with byte fallback' if fallback else ''}", byte_fallback=fallback, replaced=replaced
    )


def keeps_text(raw: dict[str, Any], vocabulary: Collection[str]) -> bool:
    """Whether every character of a text ends up in some token, and no token takes more of them than it has itself:
    nothing is normalised away, dropped, stripped or fused to one unknown token."""
    pre = _steps(raw["pre_tokenizer"])
    cuts = ("ByteLevel", "Digits", "Metaspace")
    cut_only = all(step["type"] in cuts or step.get("behavior") in _KEEP for step in pre)
    adds_only = all(step["type"] == "Prepend" or _grows(step) for step in _steps(raw["normalizer"]))
    strips = any(token["lstrip"] or token["rstrip"] for token in raw["added_tokens"])
    return cut_only and adds_only and not strips and _writes_everything(raw, vocabulary)


def _writes_everything(raw: dict[str, Any], vocabulary: Collection[str]) -> bool:
    """Whether there are pieces for all 256 bytes, and characters without a piece of their own come down to these."""
    if raw["model"]["type"] == "WordLevel":
        return False
    if any(step["type"] == "ByteLevel" for step in _steps(raw["pre_tokenizer"])):
        return all(character in vocabulary for character in BYTE_ALPHABET)
    return raw["model"].get("byte_fallback") is True and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _words(raw: dict[str, Any]) -> Pieces:
    """Without a decoder, tokens are joined by one space: right for words, and for nothing else."""
    cuts = {step["type"] for step in _steps(raw["pre_tokenizer"])}
    if raw["model"]["type"] != "WordLevel" or not cuts & {"Whitespace", "WhitespaceSplit"}:
        raise ValueError(f"without a decoder, only words cut at white space are supported, {_SUPPORTED}")
    return Pieces(kind="word-level", before=" ")


def _replaced(steps: list[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    """What the decoder replaces in each piece; ValueError for a step that is not done piece by piece."""
    replaced, fused = [], False
    for step in steps:
        kind = step["type"]
        if kind == "Metaspace":
            replaced.append((step["replacement"], " "))
        elif kind == "Replace" and step["pattern"].get("String") and not fused:
            replaced.append((step["pattern"]["String"], step["content"]))
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and step["content"] == " " and step["start"] <= 1 and not step["stop"]:
            pass  # the space that was put before the text: a matter of whole texts, not of pieces
        elif kind != "ByteFallback":
            raise ValueError(f"a {kind} decoder in this place is not supported, {_SUPPORTED}")
    return tuple(replaced)


def _grows(step: dict[str, Any]) -> bool:
    """Whether a normaliser only replaces text by text that is no shorter."""
    pattern = step["pattern"].get("String") if step["type"] == "Replace" else None
    return pattern is not None and len(step["content"]) >= len(pattern)


def _steps(node: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normaliser, pre-tokeniser or decoder, out of all sequences."""
    if node is None:
        return []
    if node["type"] != "Sequence":
        return [node]
    inner = next(value for value in node.values() if isinstance(value, list))
    return [step for part in inner for step in _steps(part)]


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes printable bytes as themselves and the others as the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
"""Character -> the byte it stands for in a byte-level piece."""
