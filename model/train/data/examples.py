"""Independent examples: lines, and pairs of a source and its target.

A row is never packed with others and starts at position 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.tokenizer.tokenizer import Tokenizer, TokenizerError
from model.train.common.sample import Prompt
from model.train.data.batch import Example
from model.train.data.corpus import held_out_rows
from model.train.data.sources import DataError, Line, Sources, read_lines
from model.train.data.token_cache import separator
from model.train.data.vocabulary import Vocabulary, started


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleText:
    """One text."""

    key: str
    """Rows of one key are held out together."""
    example: Example
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleTexts:
    """All of them, and what the training ones taught a tokenizer."""

    noun: str
    """What they are, for people."""
    found: list[ExampleText]
    held_out: set[str]
    """Keys; none where there are too few rows to spare one."""
    tokenizer: Tokenizer


def of_lines(
    sources: Sources,
    *,
    vocabulary: Vocabulary,
    from_end: bool,
    context: int,
    held_out_share: float = 0.01,
    tokenizer: Tokenizer | None = None,
) -> ExampleTexts:
    """Every line is a text, up to an end token and, where the decoder is to begin one, from an end token.

    tokenizer: one that is there already; it stays as it is, and what it begins and ends a text with does so.
    Raises DataError and TokenizerError.
    """
    lines = read_lines(sources)
    keys = [_key(line.text) for line in lines]
    held_out = held_out_rows(keys, held_out_share)
    learnt = [line.text for line, key in zip(lines, keys, strict=True) if key not in held_out]
    used = tokenizer or vocabulary.train(learnt)
    (first, last), found = _marks(used), []
    for line, key, ids in zip(lines, keys, used.encode_many([line.text for line in lines]), strict=True):
        _require(ids not in ([], [last]), line, "nothing stands before the end token")
        # None twice, as Tokenizer.encode() puts none before a text that has its own.
        start, end = [first] * (from_end and ids[0] != first), [last] * (ids[-1] != last)
        tokens = [*start, *ids, *end]
        _require_room(len(tokens), context, line, "line with its start and end" if from_end else "line with its end")
        found.append(ExampleText(key=key, example=Example(tokens), prompt=_opening(used, tokens, last)))
    if from_end and tokenizer is None:
        used = started(used, vocabulary.end_token)
    return ExampleTexts(noun="lines", found=found, held_out=held_out, tokenizer=used)


def of_pairs(
    sources: Sources,
    *,
    vocabulary: Vocabulary,
    context: int,
    held_out_share: float = 0.01,
    tokenizer: Tokenizer | None = None,
) -> ExampleTexts:
    """Every line is a source, a tab and its target. tokenizer: as in of_lines().

    Raises DataError and TokenizerError.
    """
    lines = read_lines(sources)
    for line in lines:
        _require(line.text.count("\t") == 1, line, "a pair is a source, one tab and a target")
        _require(bool(line.text.partition("\t")[0].strip()), line, "the source is empty")
    asked, told = ([line.text.split("\t")[column] for line in lines] for column in (0, 1))
    keys = list(map(_key, asked))
    held_out = held_out_rows(keys, held_out_share)
    learnt = [text for texts in (asked, told) for text, key in zip(texts, keys, strict=True) if key not in held_out]
    used = tokenizer or vocabulary.train(learnt)
    (first, last), found = _marks(used), []
    encoded = zip(used.encode_many(asked), used.encode_many(told), strict=True)
    for line, key, text, (source, target) in zip(lines, keys, asked, encoded, strict=True):
        tokens = [first, *target, last]
        _require_room(len(source), context, line, "source")
        _require_room(len(tokens), context, line, "target with its start and end")
        prompt = Prompt(text=text, tokens=[first], source=source)
        found.append(ExampleText(key=key, example=Example(tokens, source), prompt=prompt))
    used = used if tokenizer else started(used, vocabulary.end_token)
    return ExampleTexts(noun="pairs", found=found, held_out=held_out, tokenizer=used)


def _key(text: str) -> str:
    return " ".join(text.split())


def _marks(tokenizer: Tokenizer) -> tuple[int, int]:
    """What a row begins with (what the tokenizer begins every text with, or else the end of another), and ends with."""
    if tokenizer.eos_id is None:
        raise TokenizerError("the model has no token that ends a text, and lines need one: leave --per-line out")
    return separator(tokenizer)[-1], tokenizer.eos_id


def _opening(tokenizer: Tokenizer, tokens: list[int], end: int) -> Prompt:
    """The question of a line "question <end> answer <end>", or the first half of one without such a middle."""
    question = tokens.index(end, 1) + 1
    if question < len(tokens):
        opening = tokens[:question]
        return Prompt(text=f"{tokenizer.decode(opening).strip()} {tokenizer.piece(end)}", tokens=opening)
    opening = tokens[: len(tokens) // 2]
    return Prompt(text=tokenizer.decode(opening).strip(), tokens=opening)


def _require_room(n_tokens: int, context: int, line: Line, what: str) -> None:
    _require(n_tokens <= context, line, f"the {what} has {n_tokens} tokens, the context holds {context} (--context)")


def _require(condition: bool, line: Line, message: str) -> None:
    if not condition:
        raise DataError(f"{line.where}: {message}")
