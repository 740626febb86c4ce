"""A tokenizer whose tokens are the words between white space, for small closed vocabularies. Knows no model."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from model.tokenizer import Tokenizer

UNKNOWN = "<unk>"
"""Id 1: any word that the training text did not have."""

_NO_LIMIT = 2**31 - 1


def train_words(texts: Iterable[str], vocab_size: int | None, end_token: str) -> Tokenizer:
    """As many tokens as there are words, at most `vocab_size` (the most frequent). Id 0 is `end_token`, 1 UNKNOWN."""
    rust = RustTokenizer(models.WordLevel(unk_token=UNKNOWN))
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # The white space before an end token belongs to it, as that before a word does.
    special = [AddedToken(end_token, special=True, lstrip=True), AddedToken(UNKNOWN, special=True)]
    trainer = trainers.WordLevelTrainer(
        vocab_size=_NO_LIMIT if vocab_size is None else vocab_size, special_tokens=special, show_progress=False
    )
    # The trainer would give special tokens that stand in the text a second id.
    words = (text.replace(end_token, " ").replace(UNKNOWN, " ") for text in texts)
    rust.train_from_iterator(words, trainer)
    return Tokenizer(rust, end_token)
