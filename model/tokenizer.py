"""Text to token ids and token ids to bytes: a byte-level BPE in a Hugging Face tokenizer.json. Knows no model.

Text is bytes underneath: `bytes_of[id]` are a token's exact bytes, and only a decoder that sees the whole stream turns
them into characters. Special tokens have no bytes: they steer the model and are never shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

SEPARATOR = "<|endoftext|>"
"""Id 0 of the tokenizers trained here: stands between documents, and starts a text from nothing."""

# How text is cut before pairs are merged: words with one leading space or mark, English endings apart, numbers in
# threes, runs of marks, white space.
SPLIT = (
    r"['\u2019](?i:s|t|d|m|re|ve|ll)(?!\p{L})|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenizerError(ValueError):
    """A tokenizer that cannot be used; the message names the file and the reason."""


class Tokenizer:
    """A loaded tokenizer. Immutable, safe to share between threads."""

    def __init__(self, rust: RustTokenizer, eos_token: str | None = None) -> None:
        self._rust = rust
        self.vocab_size: int = rust.get_vocab_size(with_added_tokens=True)
        self.eos_id: int | None = rust.token_to_id(eos_token) if eos_token else None
        self._keeps_text = _keeps_text(json.loads(rust.to_str()))
        self._longest = max(map(len, rust.get_vocab(with_added_tokens=True)), default=1)

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Reads tokenizer.json, and eos_token from tokenizer_config.json. Raises TokenizerError."""
        path = directory / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{path}: cannot be read ({_reason(error)})") from None
        try:
            rust = RustTokenizer.from_str(text)
        except BaseException as error:  # a Rust panic is no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise TokenizerError(f"{path}: not a tokenizer ({_reason(error)})") from None
        if not isinstance(rust.decoder, decoders.ByteLevel):
            raise TokenizerError(f"{path}: only byte-level tokenizers are supported so far")
        return cls(rust, _eos_token(directory / "tokenizer_config.json"))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learns a byte-level BPE of exactly `vocab_size` tokens. Raises TokenizerError where the text is too small."""
        rust = RustTokenizer(models.BPE())
        rust.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        rust.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[SEPARATOR],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        rust.train_from_iterator(texts, trainer)
        tokenizer = cls(rust, SEPARATOR)
        if tokenizer.vocab_size != vocab_size:
            raise TokenizerError(
                f"the text supports only {tokenizer.vocab_size} tokens, not {vocab_size}: give more text or a smaller "
                "vocabulary (--vocab-size)"
            )
        return tokenizer

    def files(self) -> dict[str, str]:
        """The files of this tokenizer: name -> content."""
        eos = None if self.eos_id is None else self._rust.id_to_token(self.eos_id)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": eos,
            "bos_token": eos,
            "clean_up_tokenization_spaces": False,
        }
        return {"tokenizer.json": self._rust.to_str(), "tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with the special tokens that the tokenizer itself adds (BOS, say)."""
        return list(self._rust.encode(text).ids)

    def least_tokens(self, text: str) -> int:
        """No encoding of `text` is shorter than this; costs nothing, where encoding a megabyte takes a second."""
        return -(-len(text) // self._longest) if self._keeps_text else 0

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        """encode() of each text without added special tokens, on all cores."""
        return [encoding.ids for encoding in self._rust.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.bytes_of[token] for token in ids).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """bytes_of[token]; nothing for an id that only the model's vocabulary has (padded to a round number)."""
        return self.bytes_of[token] if token < len(self.bytes_of) else b""

    @cached_property
    def bytes_of(self) -> list[bytes]:
        """The exact bytes of every token id; empty for special tokens and for ids that the vocabulary skips."""
        byte_of = _byte_alphabet()
        added = self._rust.get_added_tokens_decoder()
        table = [b""] * (max(self._rust.get_vocab(with_added_tokens=True).values(), default=-1) + 1)
        for piece, token_id in self._rust.get_vocab(with_added_tokens=True).items():
            if token_id not in added and all(character in byte_of for character in piece):
                table[token_id] = bytes(byte_of[character] for character in piece)
            elif token_id not in added or not added[token_id].special:
                table[token_id] = piece.encode("utf-8")  # added tokens are stored as plain text
        return table


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes printable bytes as themselves and the others as the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _keeps_text(raw: dict[str, Any]) -> bool:
    """Whether every character of a text ends up in some token: nothing is normalised, cut off, stripped or dropped."""
    pre = raw.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", [pre]) if pre.get("type") == "Sequence" else [pre]
    lossless = all(s.get("type") in ("ByteLevel", "Digits") or s.get("behavior") == "Isolated" for s in steps)
    strips = any(token.get("lstrip") or token.get("rstrip") for token in raw.get("added_tokens") or [])
    whole_alphabet = _byte_alphabet().keys() <= raw["model"].get("vocab", {}).keys()
    return lossless and whole_alphabet and not strips and not raw.get("normalizer") and not raw.get("truncation")


def _eos_token(path: Path) -> str | None:
    if not path.exists():
        return None
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        token = settings.get("eos_token")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise TokenizerError(f"{path}: cannot be read ({_reason(error)})") from None
    token = token.get("content") if isinstance(token, dict) else token  # transformers 4 wrote objects
    return token if isinstance(token, str) else None


def _reason(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error).splitlines()[0][:120] if str(error) else type(error).__name__
