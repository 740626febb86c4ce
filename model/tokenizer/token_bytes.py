"""Exact bytes of the tokens of a tokenizer.json, and whether encoding is lossless.

Three formats of vocabulary pieces are supported:
    byte-level      "\\u0120fox"     every character stands for one byte (GPT-2, llama 3, Qwen)
    SentencePiece   "\\u2581fox"     U+2581 stands for a space, <0x0A> for a byte (llama 2, mistral, gemma, Unigram)
    words           "fox"         the space before a word is not written
`raw` is the content of the file as the tokenizers library writes it: complete, each step with its type.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

_SUPPORTED = "byte-level, SentencePiece-style and word-level tokenizers are"
_MODELS = {"BPE": "BPE", "Unigram": "Unigram", "WordLevel": "word-level"}
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_LOSSLESS_BEHAVIORS = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
"""Split behaviors that remove no text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceFormat:
    """How the vocabulary pieces of a tokenizer represent bytes."""

    kind: str
    """Display name of the tokenizer type."""
    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    """(characters in a piece, text they represent)"""
    prefix: str = ""
    """Text that precedes every piece without being part of it."""

    def bytes_of(self, piece: str) -> bytes:
        """The bytes that a vocabulary piece represents."""
        if self.byte_level and all(character in BYTE_ALPHABET for character in piece):
            return bytes(BYTE_ALPHABET[character] for character in piece)
        if self.byte_fallback and _BYTE_PIECE.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        for written, meant in self.replacements:
            piece = piece.replace(written, meant)
        return (self.prefix + piece).encode()

    def bytes_of_added(self, content: str) -> bytes:
        """The bytes of an added token; byte-level tokenizers store these as plain text."""
        return content.encode() if self.byte_level else self.bytes_of(content)


def piece_format(raw: dict[str, Any]) -> PieceFormat:
    """Reads the decoder. Raises ValueError if the exact bytes of a token cannot be determined."""
    model, decoder = raw["model"], raw["decoder"]
    if model["type"] not in _MODELS:
        raise ValueError(f"{model['type']} tokenizers are not supported, {_SUPPORTED}")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise ValueError(f"marks inside or at the end of words (##, </w>) are not supported, {_SUPPORTED}")
    if decoder is None:
        return _word_format(raw)
    name, kinds = _MODELS[model["type"]], [step["type"] for step in _steps(decoder)]
    if "ByteLevel" in kinds:
        if unknown := set(kinds) - {"ByteLevel", "Fuse"}:
            raise ValueError(f"a byte-level decoder with {min(unknown)} is not supported")
        return PieceFormat(kind=f"byte-level {name}", byte_level=True)
    replacements = _replacements(_steps(decoder))
    fallback = "ByteFallback" in kinds or model.get("byte_fallback") is True
    style = "SentencePiece-style " if replacements and name == "BPE" else ""
    return PieceFormat(
        kind=f"{style}{name}{' with byte fallback' if fallback else ''}",
        byte_fallback=fallback,
        replacements=replacements,
    )


def keeps_text(raw: dict[str, Any], vocabulary: Collection[str]) -> bool:
    """Whether tokens represent every character of a text, and no token covers more characters than it has.

    That is, nothing is normalized away, dropped, stripped or fused into an unknown token.
    """
    strips = any(token["lstrip"] or token["rstrip"] for token in raw["added_tokens"])
    return not strips and not _composes(raw) and _loses_nothing(raw, vocabulary)


def composes_text(raw: dict[str, Any], vocabulary: Collection[str]) -> bool:
    """Whether tokens represent every character of a text once marks are composed with the letters before them (NFC)."""
    return _composes(raw) and _loses_nothing(raw, vocabulary)


def _composes(raw: dict[str, Any]) -> bool:
    return any(step["type"] == "NFC" for step in _steps(raw["normalizer"]))


def _loses_nothing(raw: dict[str, Any], vocabulary: Collection[str]) -> bool:
    """Whether no step drops text, and there are tokens for all of it."""
    cuts, adds = ("ByteLevel", "Digits", "Metaspace"), ("Prepend", "NFC")
    cut_only = all(
        step["type"] in cuts or step.get("behavior") in _LOSSLESS_BEHAVIORS for step in _steps(raw["pre_tokenizer"])
    )
    adds_only = all(step["type"] in adds or _never_shrinks(step) for step in _steps(raw["normalizer"]))
    return cut_only and adds_only and _writes_everything(raw, vocabulary)


def _writes_everything(raw: dict[str, Any], vocabulary: Collection[str]) -> bool:
    """Whether there are pieces for all 256 bytes, and characters without a piece fall back to them."""
    if raw["model"]["type"] == "WordLevel":
        return False
    if any(step["type"] == "ByteLevel" for step in _steps(raw["pre_tokenizer"])):
        return all(character in vocabulary for character in BYTE_ALPHABET)
    return raw["model"].get("byte_fallback") is True and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _word_format(raw: dict[str, Any]) -> PieceFormat:
    """Format without a decoder: tokens are joined by one space, which is correct only for word-level models."""
    cuts = {step["type"] for step in _steps(raw["pre_tokenizer"])}
    if raw["model"]["type"] != "WordLevel" or not cuts & {"Whitespace", "WhitespaceSplit"}:
        raise ValueError(f"without a decoder, only words cut at white space are supported, {_SUPPORTED}")
    return PieceFormat(kind="word-level", prefix=" ")


def _replacements(steps: list[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Replacements of the decoder within each piece. Raises ValueError for steps that span pieces."""
    replacements, fused = [], False
    for step in steps:
        kind = step["type"]
        if kind == "Metaspace":
            replacements.append((step["replacement"], " "))
        elif kind == "Replace" and step["pattern"].get("String") and not fused:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and step["content"] == " " and step["start"] <= 1 and not step["stop"]:
            pass  # removes the space prepended to the text: applies to whole texts, not to pieces
        elif kind != "ByteFallback":
            raise ValueError(f"a {kind} decoder at this position is not supported, {_SUPPORTED}")
    return tuple(replacements)


def _never_shrinks(step: dict[str, Any]) -> bool:
    """Whether a normalizer step only replaces text with text of at least the same length."""
    pattern = step["pattern"].get("String") if step["type"] == "Replace" else None
    return pattern is not None and len(step["content"]) >= len(pattern)


def _steps(node: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder, with nested sequences flattened."""
    if node is None:
        return []
    if node["type"] != "Sequence":
        return [node]
    inner = next(value for value in node.values() if isinstance(value, list))
    return [step for part in inner for step in _steps(part)]


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE represents printable bytes as themselves and the others as characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
"""Character of a byte-level piece -> byte."""
