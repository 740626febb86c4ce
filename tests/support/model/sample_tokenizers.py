"""Small tokenizers of every supported kind, built with the tokenizers package as their authors did."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from model.tokenizer.tokenizer import SPLIT
from tests.support.model.tiny_models import TEXT

SPACE = "\u2581"
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
BOS = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
_FEW_WORDS = TEXT[:60]


def save(rust: Tokenizer, directory: Path, changes: dict[str, Any] | None = None, **config: Any) -> Path:
    """Writes tokenizer.json, with top-level `changes`, and tokenizer_config.json if there is a `config`."""
    raw = json.loads(rust.to_str()) | (changes or {})
    (directory / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    if config:
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def gpt2(pre: pre_tokenizers.PreTokenizer | None = None) -> Tokenizer:
    """Byte-level BPE that adds nothing to a text."""
    rust = Tokenizer(models.BPE())
    rust.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    rust.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(vocab_size=320, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False),
    )
    return rust


def llama3() -> Tokenizer:
    """Byte-level BPE with sequences of components, and BOS."""
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust = gpt2(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), bytewise]))
    rust.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    rust.add_special_tokens(["<|begin|>"])
    begin = ("<|begin|>", rust.token_to_id("<|begin|>"))
    template = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[begin])
    rust.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return rust


def qwen() -> Tokenizer:
    """Byte-level BPE of NFC text, with added tokens that are not special."""
    rust = gpt2()
    rust.normalizer = normalizers.NFC()
    rust.add_tokens([AddedToken("    ", normalized=False), AddedToken("caf\u00e9!\u4e2d", normalized=False)])
    return rust


def prefixed() -> Tokenizer:
    """Byte-level BPE that puts a space before every text."""
    return gpt2(pre_tokenizers.ByteLevel(add_prefix_space=True))


@functools.cache
def _sentencepiece() -> dict[str, Any]:
    rust = Tokenizer(models.BPE())
    rust.normalizer = normalizers.Replace(" ", SPACE)
    rust.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=[*SPECIAL, *BYTES], show_progress=False)
    rust.train_from_iterator([_FEW_WORDS, "a  b   c"] * 3, trainer)
    model: dict[str, Any] = json.loads(rust.to_str())["model"]
    return model


def _bpe(*, strip: bool) -> Tokenizer:
    learned = _sentencepiece()
    merges = [tuple(pair) for pair in learned["merges"]]
    rust = Tokenizer(models.BPE(learned["vocab"], merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    rust.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    rust.add_special_tokens(SPECIAL)
    rust.post_processor = BOS
    return rust


def llama2() -> Tokenizer:
    """SentencePiece-style BPE: a normalizer puts U+2581 before every text."""
    rust = _bpe(strip=True)
    rust.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    return rust


def mistral() -> Tokenizer:
    """SentencePiece-style BPE: the pre-tokenizer puts U+2581 before a text that does not begin with a space."""
    rust = _bpe(strip=True)
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return rust


def gemma() -> Tokenizer:
    """SentencePiece-style BPE that puts nothing before a text, with a run of spaces as an added token."""
    rust = _bpe(strip=False)
    rust.normalizer = normalizers.Replace(" ", SPACE)
    rust.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    rust.add_tokens([AddedToken(SPACE * 2, normalized=False)])
    return rust


def unigram() -> Tokenizer:
    """Unigram with few characters and byte fallback."""
    rust = _trained_unigram(_FEW_WORDS)
    pieces = [tuple(piece) for piece in json.loads(rust.to_str())["model"]["vocab"]]
    rust.model = models.Unigram(pieces + [(byte, -20.0) for byte in BYTES], 0, byte_fallback=True)
    rust.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return rust


def unigram_with_unknown() -> Tokenizer:
    """Unigram without byte fallback: unknown characters are lost."""
    rust = _trained_unigram(TEXT)
    rust.decoder = decoders.Metaspace()
    return rust


def _trained_unigram(text: str) -> Tokenizer:
    rust = Tokenizer(models.Unigram())
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    rust.train_from_iterator([text] * 3, trainer)
    rust.post_processor = BOS
    return rust


def words(pre: pre_tokenizers.PreTokenizer | None = None) -> Tokenizer:
    """One token per word."""
    rust = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    rust.pre_tokenizer = pre or pre_tokenizers.WhitespaceSplit()
    rust.train_from_iterator([TEXT], trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False))
    rust.add_special_tokens([AddedToken("<EOS>", lstrip=True)])
    return rust


def words_and_marks() -> Tokenizer:
    """One token per word or punctuation mark."""
    return words(pre_tokenizers.Whitespace())


def characters() -> Tokenizer:
    """One token per character, as in many tutorials."""
    rust = Tokenizer(models.BPE({character: i for i, character in enumerate(sorted(set(TEXT)))}, []))
    rust.decoder = decoders.Fuse()
    return rust


KINDS: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "gpt2": (gpt2, "byte-level BPE"),
    "llama3": (llama3, "byte-level BPE"),
    "qwen": (qwen, "byte-level BPE"),
    "prefixed": (prefixed, "byte-level BPE"),
    "llama2": (llama2, "SentencePiece-style BPE with byte fallback"),
    "mistral": (mistral, "SentencePiece-style BPE with byte fallback"),
    "gemma": (gemma, "SentencePiece-style BPE with byte fallback"),
    "unigram": (unigram, "Unigram with byte fallback"),
    "unigram_with_unknown": (unigram_with_unknown, "Unigram"),
    "words": (words, "word-level"),
    "words_and_marks": (words_and_marks, "word-level"),
    "characters": (characters, "BPE"),
}
"""name -> (builder, its `kind`)"""
