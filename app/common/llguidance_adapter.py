"""Adapter for llguidance: builds a vocabulary from token bytes and matchers from grammars, within limits.

Only this module imports the package. An installation without it serves everything but constrained decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

INSTALLED = find_spec("llguidance") is not None

_llguidance: Any = import_module("llguidance") if INSTALLED else None

MAX_ITEMS_IN_ROW = 500
"""Limit of the Earley parser: with an ambiguous grammar the cost of a row grows with the square of its items."""

# Appended to the grammar, so that it overrides the grammar's own options: a fixed text may be spelled with any tokens.
# Otherwise llguidance asks the tokenizer which tokens to use, and only the bytes of each token are available here.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'


class GrammarVocabulary:
    """The bytes of every token, in llguidance's format. Immutable, safe to share between threads.

    Tokens without text (special ones, and ids that only the model has) are never allowed. The end of the text is an
    extra token after all others, `end`, because each request decides which of the model's tokens end its text.
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
        """Compiles a Lark grammar to a new LLMatcher; check is_error(). Releases the GIL while it compiles.

        Never returns a copy of another matcher: copies share a lexer, and with it the lexer's limits.
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
        raise AssertionError("llguidance must not tokenize: no_forcing is set")


def _limits(vocab_size: int) -> Any:
    """Limits the cost of one mask to about 5 ms with a small vocabulary, at most 12 ms, and 40 MB of memory.

    Grammars from real use (tests/support/engine/grammar_corpus.py) need at most 200 items in a row, 10,000 units of
    fuel and 5,000 lexer states; and 400 items in a step with 4,096 tokens, 0.06 per token with 100,000.
    """
    return _llguidance.LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        step_lexer_fuel=40_000,
        step_max_items=max(2_000, vocab_size // 8),
        max_lexer_states=20_000,
        verbose_errors=False,
    )
