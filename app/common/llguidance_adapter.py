"""The one module that imports llguidance: token bytes to a vocabulary, a grammar to a matcher, and their limits.

The package is an optional dependency (`guided`); this is the only module that imports it, if it is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

INSTALLED = find_spec("llguidance") is not None

_llguidance: Any = import_module("llguidance") if INSTALLED else None

MAX_ITEMS_IN_ROW = 500
"""Of an Earley parser: what a row costs grows with the square of its items where a grammar is ambiguous."""

# At the end of the grammar, where it outweighs what the grammar says: a fixed text may be spelled with any tokens. Else
# llguidance asks the tokenizer which ones to use, and we know no more of it than the bytes of its tokens.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'


class GrammarVocabulary:
    """The text of every token, as llguidance wants it. Immutable, safe to share between threads.

    Tokens without text (special ones, and ids that only the model has) are never allowed. The end of the text is a
    token of our own behind all others, `end`: which of the model's tokens end a text is each request's to say.
    """

    def __init__(self, bytes_of: Sequence[bytes], size: int) -> None:
        """`size` is the model's vocabulary, which may be larger than the tokenizer's. Raises ValueError."""
        if _llguidance is None:
            raise ValueError("llguidance is not installed")
        assert len(bytes_of) <= size
        self.size = size
        self.end = size
        self.bytes_of = [*bytes_of, *[b""] * (size - len(bytes_of))]
        self._limits = _limits(size)
        self._tokenizer = _llguidance.LLTokenizer(_Tokens([*self.bytes_of, b""], self.end))

    def matcher(self, grammar: str) -> Any:
        """A new LLMatcher for a grammar in Lark; one that failed says is_error(). Drops the GIL as it compiles.

        Never a copy of another: copies share a lexer, and where it reaches a bound for one, it has for all.
        """
        return _llguidance.LLMatcher(self._tokenizer, grammar + _OPTIONS, log_level=0, limits=self._limits)


class _Tokens:
    """The protocol of llguidance's TokenizerWrapper."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, tokens: Sequence[bytes], end: int) -> None:
        self.tokens = tokens
        self.eos_token_id = end

    def __call__(self, _text: str) -> list[int]:
        raise AssertionError("asked for tokens although nothing is forced")


def _limits(vocab_size: int) -> Any:
    """What one mask may cost: about 5 ms where the vocabulary is small, 12 ms at worst; and 40 MB of memory.

    The most that 42 grammars of real use need (tests/support/engine/grammar_corpus.py) is 200 items in a row, 10,000
    units of fuel and 5,000 lexer states; of items in a step 400 with 4,096 tokens, 0.06 for each token with 100,000.
    """
    return _llguidance.LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        step_lexer_fuel=40_000,
        step_max_items=max(2_000, vocab_size // 8),
        max_lexer_states=20_000,
        verbose_errors=False,
    )
