"""A tokenizer of any size for models with random weights: the words of the benchmark's prompts, plus made-up ones."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from benchmarks.prompts import pseudo_prose
from model.tokenizer.tokenizer import Tokenizer

_VOWELS = ("a", "e", "i", "o", "u", "ai", "ou")
_SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstvwz" for vowel in _VOWELS]
_PROSE_WORDS = 20_000


def tokenizer_of(vocab_size: int) -> Tokenizer:
    """Exactly `vocab_size` tokens; a word of the prompts is about one of them."""
    return Tokenizer.train(_texts(vocab_size), vocab_size)


def _texts(vocab_size: int) -> Iterator[str]:
    """The prompts' prose often enough to be merged first; then words enough for the rest of the vocabulary."""
    yield from (pseudo_prose(index=index, words=100, seed=9) for index in range(_PROSE_WORDS // 100))
    random = Random(0)
    for _ in range(vocab_size // 8):
        yield " ".join("".join(random.choices(_SYLLABLES, k=random.randint(2, 5))) for _ in range(16))
