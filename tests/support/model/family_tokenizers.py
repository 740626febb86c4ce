"""Small tokenizers built as those of model families are: the same steps and added tokens, vocabularies of our own."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from model.tokenizer.regexes import LINEAR_PATTERNS
from tests.support.mixed_text import mixed_text
from tests.support.model.sample_tokenizers import BOS, BYTES, SPACE, SPECIAL

_VOCAB = 2500
_PIECES = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
_FIRST_SPACE = decoders.Strip(" ", 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTokenizer:
    """A kind of tokenizer."""

    build: Callable[[], Tokenizer]
    composes: bool = False
    """Whether it composes characters (NFC)."""
    first_space: Literal["none", "always", "unless"] = "none"
    """Whether it puts a space before a text; `unless` the text begins with one."""

    def written(self, text: str) -> str:
        """What the bytes of a text's tokens add up to, if it has no added tokens."""
        text = unicodedata.normalize("NFC", text) if self.composes else text
        adds = self.first_space == "always" or (self.first_space == "unless" and not text.startswith(" "))
        return " " + text if text and adds else text


@cache
def _trained_pieces() -> dict[str, Any]:
    """Vocabulary and merges of a SentencePiece-like BPE; U+2581 stands for a space, and begins words."""
    rust = Tokenizer(models.BPE())
    rust.normalizer = normalizers.Replace(" ", SPACE)
    rust.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=_VOCAB, special_tokens=[*SPECIAL, *BYTES], show_progress=False)
    rust.train_from_iterator([mixed_text(100_000, 0)], trainer)
    model: dict[str, Any] = json.loads(rust.to_str())["model"]
    return model


def _pieces(
    normalizer: normalizers.Normalizer | None,
    pre: pre_tokenizers.PreTokenizer | None,
    decoder: decoders.Decoder,
    added: Sequence[AddedToken] = (),
) -> Tokenizer:
    """SentencePiece-like BPE with byte fallback."""
    learned = _trained_pieces()
    merges = [tuple(pair) for pair in learned["merges"]]
    rust = Tokenizer(models.BPE(learned["vocab"], merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    rust.decoder = decoder
    if normalizer:
        rust.normalizer = normalizer
    if pre:
        rust.pre_tokenizer = pre
    rust.add_special_tokens(SPECIAL)
    rust.add_tokens(list(added))
    rust.post_processor = BOS
    return rust


def _sequence(*steps: decoders.Decoder) -> decoders.Decoder:
    return decoders.Sequence(list(steps))


def _prepend() -> Tokenizer:
    """Llama 2, Phi 3, Mistral 0.3, TinyLlama."""
    steps = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    return _pieces(steps, None, _sequence(*_PIECES, _FIRST_SPACE))


def _metaspace(scheme: str, *, split: bool) -> Tokenizer:
    """Metaspace before and after, as in Mistral 0.1 and in what transformers writes for Llama."""
    steps = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    if scheme == "never":
        return _pieces(None, steps, _sequence(*_PIECES))
    return _pieces(None, steps, _sequence(decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)))


def _gemma() -> Tokenizer:
    """Gemma 1, 2 and 3: runs of spaces, and of line ends, are tokens."""
    runs = [AddedToken(run * n, normalized=False) for run in (SPACE, "\n", "\t") for n in (2, 3, 7, 31)]
    split = pre_tokenizers.Split(" ", "merged_with_previous")
    return _pieces(normalizers.Replace(" ", SPACE), split, _sequence(*_PIECES), runs)


def _ernie() -> Tokenizer:
    """ERNIE 4.5: a replacement, no pre-tokenizer."""
    return _pieces(normalizers.Replace(" ", SPACE), None, _sequence(*_PIECES))


@cache
def _unigram_pieces() -> tuple[tuple[str, float], ...]:
    rust = Tokenizer(models.Unigram())
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=500, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    rust.train_from_iterator([mixed_text(40_000, 0)], trainer)
    return tuple((piece, score) for piece, score in json.loads(rust.to_str())["model"]["vocab"])


def _unigram() -> Tokenizer:
    """Helium: Unigram with byte fallback."""
    rust = Tokenizer(models.Unigram([*_unigram_pieces(), *((byte, -30.0) for byte in BYTES)], 0, byte_fallback=True))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    rust.decoder = _sequence(*_PIECES, _FIRST_SPACE)
    rust.add_special_tokens(SPECIAL)
    rust.post_processor = BOS
    return rust


def pattern_of(family: str) -> str:
    """The pattern that cuts the words of a family."""
    return next(pattern for pattern, names in LINEAR_PATTERNS.items() if family in names)


def _bytes(
    *pre: pre_tokenizers.PreTokenizer,
    normalizer: normalizers.Normalizer | None = None,
    added: Sequence[AddedToken] = (),
    ignores_merges: bool = False,
) -> Tokenizer:
    """Byte-level BPE."""
    rust = Tokenizer(models.BPE())
    if normalizer:
        rust.normalizer = normalizer
    rust.pre_tokenizer = pre[0] if len(pre) == 1 else pre_tokenizers.Sequence(list(pre))
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    rust.train_from_iterator([mixed_text(100_000, 0)], trainer)
    if ignores_merges:
        rust = _with_whole_words(rust)
    rust.add_tokens(list(added))
    return rust


def _with_whole_words(rust: Tokenizer) -> Tokenizer:
    """Adds words that no merge makes, which a model that ignores merges takes as they are."""
    raw = json.loads(rust.to_str())
    for word in ("\u0120fox", "\u0120sampling", "\u00f0\u0141\u00a6\u012c"):
        raw["model"]["vocab"].setdefault(word, len(raw["model"]["vocab"]))
    raw["model"]["ignore_merges"] = True
    return Tokenizer.from_str(json.dumps(raw))


def _level(*, cuts: bool = True, space: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=cuts)


def _split(family: str) -> tuple[pre_tokenizers.PreTokenizer, ...]:
    return pre_tokenizers.Split(Regex(pattern_of(family)), "isolated"), _level(cuts=False)


def _digits(*, individual: bool = True) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Digits(individual_digits=individual)


def _llama3() -> Tokenizer:
    rust = _bytes(*_split("Llama 3"), ignores_merges=True)
    rust.add_special_tokens(["<|begin|>"])
    begin = ("<|begin|>", rust.token_to_id("<|begin|>"))
    template = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[begin])
    rust.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return rust


def _prefix_space() -> Tokenizer:
    rust = _bytes(_level(space=True))
    rust.post_processor = processors.ByteLevel(trim_offsets=True)
    return rust


def _falcon() -> Tokenizer:
    triples = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")
    return _bytes(pre_tokenizers.Punctuation("contiguous"), _level(), _digits(individual=False), triples)


def _deepseek() -> Tokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+")]
    return _bytes(*splits, _digits(), _level(cuts=False))


_RUNS = [AddedToken(" " * n, normalized=False) for n in (2, 3, 4, 8, 16)]


def _kind(build: Callable[[], Tokenizer], first_space: Literal["none", "always", "unless"] = "none") -> FamilyTokenizer:
    return FamilyTokenizer(build=build, first_space=first_space)


def _composing(*pre: pre_tokenizers.PreTokenizer, added: Sequence[AddedToken] = ()) -> FamilyTokenizer:
    return FamilyTokenizer(build=lambda: _bytes(*pre, normalizer=normalizers.NFC(), added=added), composes=True)


FAMILY_TOKENIZERS: dict[str, FamilyTokenizer] = {
    "llama2": _kind(_prepend, "always"),
    "metaspace always": _kind(lambda: _metaspace("always", split=False), "unless"),
    "metaspace always, split": _kind(lambda: _metaspace("always", split=True), "unless"),
    "metaspace first": _kind(lambda: _metaspace("first", split=False), "unless"),
    "metaspace never": _kind(lambda: _metaspace("never", split=True)),
    "gemma": _kind(_gemma),
    "ernie": _kind(_ernie),
    "unigram": _kind(_unigram, "always"),
    "gpt2": _kind(lambda: _bytes(_level())),
    "prefix space": _kind(_prefix_space, "unless"),
    "llama3": _kind(_llama3),
    "o200k": _kind(lambda: _bytes(*_split("o200k"), ignores_merges=True)),
    "tekken": _kind(lambda: _bytes(*_split("Tekken"))),
    "qwen": _composing(*_split("Qwen")),
    "starcoder": _kind(lambda: _bytes(_digits(), _level())),
    "cohere": _composing(_digits(), _level()),
    "olmo": _composing(_level(), added=_RUNS),
    "falcon": _kind(_falcon),
    "deepseek": _kind(_deepseek),
}
