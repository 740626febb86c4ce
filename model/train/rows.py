"""Texts that stand by themselves: lines, and pairs of a source and its target. Knows no order and no network.

A row is never packed with others and starts at position 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from model.tokenizer import Tokenizer
from model.train.batch import Example
from model.train.hold_out import held_out_rows
from model.train.sample import Prompt
from model.train.sources import DataError, Line, read_lines
from model.train.vocabulary import Given, Vocabulary, end_of, start_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One text."""

    key: str
    """Rows of one key are held out together."""
    example: Example
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """All of them, and what the training ones taught a tokenizer."""

    noun: str
    """What they are, for people."""
    found: list[Row]
    held_out: set[str]
    """Keys; none where there are too few rows to spare one."""
    tokenizer: Tokenizer


def of_lines(sources: Sequence[str], *, vocabulary: Vocabulary | Given, from_end: bool, context: int) -> Rows:
    """Every line is a text, up to an end token and, where the decoder is to begin one, from an end token.

    Raises DataError and TokenizerError.
    """
    lines = read_lines(sources)
    keys = [_key(line.text) for line in lines]
    held_out = held_out_rows(keys)
    tokenizer = vocabulary.train([line.text for line, key in zip(lines, keys, strict=True) if key not in held_out])
    first, last, found = start_of(tokenizer), end_of(tokenizer), []
    for line, key, ids in zip(lines, keys, tokenizer.encode_many([line.text for line in lines]), strict=True):
        _require(ids not in ([], [last]), line, "nothing stands before the end token")
        # None twice, as Tokenizer.encode() puts none before a text that has its own.
        start, end = [first] * (from_end and ids[0] != first), [last] * (ids[-1] != last)
        tokens = [*start, *ids, *end]
        _require_room(len(tokens), context, line, "line with its start and end" if from_end else "line with its end")
        found.append(Row(key=key, example=Example(tokens), prompt=_opening(tokenizer, tokens, vocabulary.end_token)))
    if from_end:
        tokenizer = vocabulary.started(tokenizer)
    return Rows(noun="lines", found=found, held_out=held_out, tokenizer=tokenizer)


def of_pairs(sources: Sequence[str], *, vocabulary: Vocabulary | Given, context: int) -> Rows:
    """Every line is a source, a tab and its target. Raises DataError and TokenizerError."""
    lines = read_lines(sources)
    for line in lines:
        _require(line.text.count("\t") == 1, line, "a pair is a source, one tab and a target")
        _require(bool(line.text.partition("\t")[0].strip()), line, "the source is empty")
    asked, told = ([line.text.split("\t")[column] for line in lines] for column in (0, 1))
    keys = list(map(_key, asked))
    held_out = held_out_rows(keys)
    learnt = [text for texts in (asked, told) for text, key in zip(texts, keys, strict=True) if key not in held_out]
    tokenizer = vocabulary.train(learnt)
    first, last, found = start_of(tokenizer), end_of(tokenizer), []
    encoded = zip(tokenizer.encode_many(asked), tokenizer.encode_many(told), strict=True)
    for line, key, text, (source, target) in zip(lines, keys, asked, encoded, strict=True):
        tokens = [first, *target, last]
        _require_room(len(source), context, line, "source")
        _require_room(len(tokens), context, line, "target with its start and end")
        prompt = Prompt(text=text, tokens=[first], source=source)
        found.append(Row(key=key, example=Example(tokens, source), prompt=prompt))
    tokenizer = vocabulary.started(tokenizer)
    return Rows(noun="pairs", found=found, held_out=held_out, tokenizer=tokenizer)


def _key(text: str) -> str:
    return " ".join(text.split())


def _opening(tokenizer: Tokenizer, tokens: list[int], end_token: str) -> Prompt:
    """The question of a line "question <end> answer <end>", or the first half of one without such a middle."""
    question = tokens.index(end_of(tokenizer), 1) + 1
    if question < len(tokens):
        opening = tokens[:question]
        return Prompt(text=f"{tokenizer.decode(opening).strip()} {end_token}", tokens=opening)
    opening = tokens[: len(tokens) // 2]
    return Prompt(text=tokenizer.decode(opening).strip(), tokens=opening)


def _require_room(n_tokens: int, context: int, line: Line, what: str) -> None:
    _require(n_tokens <= context, line, f"the {what} has {n_tokens} tokens, the context holds {context} (--context)")


def _require(condition: bool, line: Line, message: str) -> None:
    if not condition:
        raise DataError(f"{line.where}: {message}")
