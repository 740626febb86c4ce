"""Material whose rows stand by themselves: lines, and pairs of a source and its target. Knows no network.

A row is never packed with others and starts at position 0; the measure of the result is held-out rows, where there
are enough of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from model.batch import Example, Examples, padded
from model.hold_out import held_out_rows
from model.material import Material
from model.sample import Prompt
from model.sources import DataError, Line, read_lines
from model.tokenizer import Tokenizer
from model.vocabulary import END, Vocabulary, started

_MEASURED_AT_ONCE = 64
_PROMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    key: str
    """Rows of one key are held out together."""
    example: Example
    prompt: Prompt


def of_lines(
    sources: Sequence[str], *, vocabulary: Vocabulary, from_end: bool, context: int, rows: int, seed: int
) -> Material:
    """Every line is a text, up to an end token and, where the decoder is to begin one, from an end token.

    Raises DataError and TokenizerError.
    """
    lines = read_lines(sources)
    keys = [_key(line.text) for line in lines]
    held_out = held_out_rows(keys)
    tokenizer = vocabulary.train([line.text for line, key in zip(lines, keys, strict=True) if key not in held_out])
    found = []
    for line, key, ids in zip(lines, keys, tokenizer.encode_many([line.text for line in lines]), strict=True):
        _require(ids != [END], line, "nothing stands before the end token")
        # None twice, as Tokenizer.encode() puts none before a text that has its own.
        start, end = [END] * (from_end and ids[0] != END), [END] * (ids[-1] != END)
        tokens = [*start, *ids, *end]
        _require_room(len(tokens), context, line, "line with its start and end" if from_end else "line with its end")
        found.append(_Row(key=key, example=Example(tokens), prompt=_opening(tokenizer, tokens, vocabulary.end_token)))
    if from_end:
        tokenizer = started(tokenizer, vocabulary.end_token)
    return _material("lines", found, held_out, tokenizer, vocabulary, rows=rows, seed=seed)


def of_pairs(sources: Sequence[str], *, vocabulary: Vocabulary, context: int, rows: int, seed: int) -> Material:
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
    found = []
    encoded = zip(tokenizer.encode_many(asked), tokenizer.encode_many(told), strict=True)
    for line, key, text, (source, target) in zip(lines, keys, asked, encoded, strict=True):
        tokens = [END, *target, END]
        _require_room(len(source), context, line, "source")
        _require_room(len(tokens), context, line, "target with its start and end")
        prompt = Prompt(text=text, tokens=[END], source=source)
        found.append(_Row(key=key, example=Example(tokens, source), prompt=prompt))
    tokenizer = started(tokenizer, vocabulary.end_token)
    return _material("pairs", found, held_out, tokenizer, vocabulary, rows=rows, seed=seed)


def _material(
    noun: str,
    found: Sequence[_Row],
    held_out: set[str],
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    *,
    rows: int,
    seed: int,
) -> Material:
    train = [row.example for row in found if row.key not in held_out]
    # One row of each key, be it held out or, where nothing is, learnt from.
    measured = list({row.key: row for row in found if row.key in held_out or not held_out}.values())
    examples = [row.example for row in measured]
    n_tokens = sum(len(example.tokens) - 1 for example in train)
    n_words = tokenizer.vocab_size
    short = f"a vocabulary of {n_words}, the text supports no more; " if n_words < (vocabulary.size or 0) else ""
    few = f"held-out: none, {len(measured)} {noun} are too few; bits per byte are of the training {noun}"
    return Material(
        tokenizer=tokenizer,
        batch=Examples(train, rows=rows, seed=seed).batch,
        rows=rows,
        per_epoch=len(train),
        n_tokens=n_tokens,
        row_tokens=n_tokens / len(train),
        held_out=[padded(examples[i : i + _MEASURED_AT_ONCE]) for i in range(0, len(examples), _MEASURED_AT_ONCE)],
        measured="held-out" if held_out else "training",
        corpus=f"{len(found)} {noun}, {n_tokens} training tokens; {short}"
        + (f"held-out: {len(measured)} {noun}" if held_out else few),
        prompts=[row.prompt for row in measured[:_PROMPTS]],
        digest=_digest(tokenizer, found),
    )


def _key(text: str) -> str:
    return " ".join(text.split())


def _opening(tokenizer: Tokenizer, tokens: list[int], end_token: str) -> Prompt:
    """The question of a line "question <end> answer <end>", or the first half of one without such a middle."""
    question = tokens.index(END, 1) + 1
    if question < len(tokens):
        opening = tokens[:question]
        return Prompt(text=f"{tokenizer.decode(opening).strip()} {end_token}", tokens=opening)
    opening = tokens[: len(tokens) // 2]
    return Prompt(text=tokenizer.decode(opening).strip(), tokens=opening)


def _digest(tokenizer: Tokenizer, found: Sequence[_Row]) -> str:
    digest = hashlib.sha256("".join(tokenizer.files().values()).encode())
    for row in found:
        digest.update(repr(row.example).encode())
    return digest.hexdigest()


def _require_room(n_tokens: int, context: int, line: Line, what: str) -> None:
    _require(n_tokens <= context, line, f"the {what} has {n_tokens} tokens, the context holds {context} (--context)")


def _require(condition: bool, line: Line, message: str) -> None:
    if not condition:
        raise DataError(f"{line.where}: {message}")
