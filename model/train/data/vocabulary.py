"""Kind and size of the tokenizer that a run trains, and its end token."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from tokenizers import AddedToken, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer

from model.tokenizer.tokenizer import SEPARATOR, Tokenizer, TokenizerError

END = 0
"""Id of the end token in every tokenizer trained here; it also starts a text without a prompt."""
UNKNOWN = "<unk>"
"""Id 1: any word that is not in the training text."""
_NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Settings of the tokenizer to train."""

    kind: Literal["bpe", "words"]
    size: int | None
    """bpe: exactly this many tokens, or fewer if `fewer`. words: the maximum; None means one token per word."""
    end_token: str
    fewer: bool = False
    """bpe: whether to accept fewer tokens if the text does not support more."""

    def train(self, texts: list[str]) -> Tokenizer:
        """Trains a tokenizer on `texts`. Raises TokenizerError."""
        if self.kind == "words":
            return _train_words(texts, self.size or _NO_LIMIT, self.end_token)
        assert self.size is not None, "a bpe has a size"
        tokenizer = Tokenizer.train(texts, self.size, fewer=self.fewer)
        return tokenizer if self.end_token == SEPARATOR else _renamed(tokenizer, self.end_token)


def with_start_token(tokenizer: Tokenizer, end_token: str) -> Tokenizer:
    """The same tokenizer, but encode() prepends the end token to a prompt, as encoder-decoders need.

    encode_many() is unchanged: it adds nothing to a source.
    """
    rust = RustTokenizer.from_str(tokenizer.files()["tokenizer.json"])
    rust.post_processor = processors.TemplateProcessing(single=[end_token, "$A"], special_tokens=[(end_token, END)])
    return Tokenizer(rust, end_token)


def _train_words(texts: list[str], vocab_size: int, end_token: str) -> Tokenizer:
    """One token per word, at most `vocab_size` (the most frequent). Id 0 is `end_token`, id 1 UNKNOWN."""
    rust = RustTokenizer(models.WordLevel(unk_token=UNKNOWN))
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # The whitespace before an end token belongs to it, as with words.
    special = [AddedToken(end_token, special=True, lstrip=True), AddedToken(UNKNOWN, special=True)]
    trainer = trainers.WordLevelTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    # The trainer would give special tokens that occur in the text a second id.
    rust.train_from_iterator((text.replace(end_token, " ").replace(UNKNOWN, " ") for text in texts), trainer)
    return Tokenizer(rust, end_token)


def _renamed(tokenizer: Tokenizer, end_token: str) -> Tokenizer:
    raw = json.loads(tokenizer.files()["tokenizer.json"])
    words = raw["model"]["vocab"]
    if end_token in words:
        raise TokenizerError(f"the end token {end_token!r} is also a token of the text; choose another (--end-token)")
    words[end_token] = words.pop(SEPARATOR)
    raw["added_tokens"][0]["content"] = end_token
    return Tokenizer(RustTokenizer.from_str(json.dumps(raw)), end_token)
