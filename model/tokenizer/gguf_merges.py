"""Merges of SentencePiece's BPE, which a GGUF file has as one score per token.

SentencePiece merges the neighbors whose common token has the highest score, and of equal ones the first in the text. A
tokenizer.json lists the pairs in that order; which of the pairs that make the same token comes first was decided
differently by the two versions of transformers that wrote the public files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from model.tokenizer.gguf_vocabulary import PREFIX, GgufVocabulary, TokenType
from model.tokenizer.size_limits import MAX_ENTRIES

_MOST_WORK = 1 << 28
"""Characters compared: at most the square of each token's length. The tokens of Gemma 3 need 20 million."""
_NEVER_MERGED = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.BYTE)

Pair = tuple[str, str]


def merges_from_scores(vocabulary: GgufVocabulary, tokens: Sequence[str], *, longest_first: bool) -> list[Pair]:
    """All pairs of tokens that make a token, in the order of merging. Raises ValueError if they are too many.

    longest_first: of pairs with the same score, whether the longest left part comes first (Gemma), instead of the
    lowest ids (Llama, Mistral).
    """
    if sum(len(token) ** 2 for token in tokens) > _MOST_WORK:
        raise ValueError(
            f"{PREFIX}tokens has too many long tokens to find their merges: use a file with {PREFIX}merges"
        )
    ids = {text: token for token, text in enumerate(tokens)}
    score_of = _scores(vocabulary)
    pairs: list[tuple[float, Pair]] = []
    for token, text in enumerate(tokens):
        if vocabulary.types[token] not in _NEVER_MERGED:
            pairs += [(-score_of[token], pair) for pair in _pairs(text, ids)]
            if len(tokens) + len(pairs) > MAX_ENTRIES:
                raise ValueError(f"{PREFIX}tokens has more than {MAX_ENTRIES} tokens and merges, which is the limit")
    if longest_first:
        pairs.sort(key=lambda pair: (pair[0], -len(pair[1][0]), -len(pair[1][1])))
    else:
        pairs.sort(key=lambda pair: pair[0])  # stable, so that of equal scores the lowest ids come first
    return [pair for _, pair in pairs]


def _pairs(text: str, ids: Mapping[str, int]) -> list[Pair]:
    found = [
        (left, right) for cut in range(1, len(text)) if (left := text[:cut]) in ids and (right := text[cut:]) in ids
    ]
    return sorted(found, key=lambda pair: (ids[pair[0]], ids[pair[1]])) if len(found) > 1 else found


def _scores(vocabulary: GgufVocabulary) -> Sequence[float]:
    """Scores that order the merges.

    Tokens that the user defined (runs of spaces and line ends, in Gemma) have the highest: converters replace theirs by
    -1000. Converters without SentencePiece's model give all tokens the same score; then the ids have the order.
    """
    normal = vocabulary.ids_of_type(TokenType.NORMAL)
    if len({vocabulary.scores[token] for token in normal}) == 1 < len(normal):
        return [-float(token) for token in range(len(vocabulary.tokens))]
    return [
        0.0 if kind == TokenType.USER_DEFINED else score
        for kind, score in zip(vocabulary.types, vocabulary.scores, strict=True)
    ]
