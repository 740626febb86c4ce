"""Independent examples: lines, and pairs of a source and its target.

Rows are not packed together; each starts at position 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.tokenizer.tokenizer import Tokenizer, TokenizerError
from model.train.data.batch import Example
from model.train.data.corpus import held_out_rows
from model.train.data.sources import DataError, Line, Sources
from model.train.data.token_cache import separator
from model.train.data.vocabulary import Vocabulary, with_start_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt to sample from."""

    text: str
    """The start of the text, or the source of one."""
    tokens: list[int]
    source: list[int] | None = None
    """Input of the encoder, if the model has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleText:
    """One example with its key and sample prompt."""

    key: str
    """Rows with the same key are held out together."""
    example: Example
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleTexts:
    """All examples, and a tokenizer trained on the training ones."""

    noun: str
    """Display name of the examples."""
    rows: list[ExampleText]
    held_out: set[str]
    """Keys of held-out rows; empty if there are too few rows."""
    tokenizer: Tokenizer


def examples_of_lines(
    sources: Sources,
    *,
    vocabulary: Vocabulary,
    from_end: bool,
    context: int,
    held_out_share: float = 0.01,
    tokenizer: Tokenizer | None = None,
) -> ExampleTexts:
    """One example per line, followed by an end token and, if `from_end`, preceded by one.

    tokenizer: an existing one, used unchanged with its own start and end tokens. Raises DataError and TokenizerError.
    """
    lines = sources.lines()
    texts = [line.text for line in lines]
    keys = [_key(text) for text in texts]
    held_out = held_out_rows(keys, held_out_share)
    used = tokenizer or vocabulary.train(_training_texts(keys, held_out, texts))
    (first, last), rows = _boundary_tokens(used), []
    for line, key, ids in zip(lines, keys, used.encode_many(texts), strict=True):
        _require(ids not in ([], [last]), line, "there is no text before the end token")
        # Do not duplicate tokens that the line has itself, like Tokenizer.encode().
        tokens = [*[first] * (from_end and ids[0] != first), *ids, *[last] * (ids[-1] != last)]
        _require_fits(len(tokens), context, line, "line with its start and end" if from_end else "line with its end")
        rows.append(ExampleText(key=key, example=Example(tokens), prompt=_sample_prompt(used, tokens, last)))
    if from_end and tokenizer is None:
        used = with_start_token(used, vocabulary.end_token)
    return ExampleTexts(noun="lines", rows=rows, held_out=held_out, tokenizer=used)


def examples_of_pairs(
    sources: Sources,
    *,
    vocabulary: Vocabulary,
    context: int,
    held_out_share: float = 0.01,
    tokenizer: Tokenizer | None = None,
) -> ExampleTexts:
    """One example per line, which holds a source, a tab and its target. tokenizer: as in examples_of_lines().

    Raises DataError and TokenizerError.
    """
    lines = sources.lines()
    for line in lines:
        _require(line.text.count("\t") == 1, line, "a pair is a source, one tab and a target")
        _require(bool(line.text.partition("\t")[0].strip()), line, "the source is empty")
    source_texts, target_texts = ([line.text.split("\t")[column] for line in lines] for column in (0, 1))
    keys = [_key(text) for text in source_texts]
    held_out = held_out_rows(keys, held_out_share)
    used = tokenizer or vocabulary.train(_training_texts(keys, held_out, source_texts, target_texts))
    (first, last), rows = _boundary_tokens(used), []
    encoded = zip(used.encode_many(source_texts), used.encode_many(target_texts), strict=True)
    for line, key, text, (source, target) in zip(lines, keys, source_texts, encoded, strict=True):
        tokens = [first, *target, last]
        _require_fits(len(source), context, line, "source")
        _require_fits(len(tokens), context, line, "target with its start and end")
        prompt = Prompt(text=text, tokens=[first], source=source)
        rows.append(ExampleText(key=key, example=Example(tokens, source), prompt=prompt))
    used = used if tokenizer else with_start_token(used, vocabulary.end_token)
    return ExampleTexts(noun="pairs", rows=rows, held_out=held_out, tokenizer=used)


def _key(text: str) -> str:
    return " ".join(text.split())


def _training_texts(keys: list[str], held_out: set[str], *columns: list[str]) -> list[str]:
    return [text for texts in columns for text, key in zip(texts, keys, strict=True) if key not in held_out]


def _boundary_tokens(tokenizer: Tokenizer) -> tuple[int, int]:
    """(start token, end token) of a row; the start token is the tokenizer's BOS, or else the end token."""
    if tokenizer.eos_id is None:
        raise TokenizerError("the model has no end token, which lines need: omit --per-line")
    return separator(tokenizer)[-1], tokenizer.eos_id


def _sample_prompt(tokenizer: Tokenizer, tokens: list[int], end: int) -> Prompt:
    """The question of a line "question <end> answer <end>", or the first half of any other line."""
    question = tokens.index(end, 1) + 1
    if question < len(tokens):
        prompt_ids = tokens[:question]
        return Prompt(text=f"{tokenizer.decode(prompt_ids).strip()} {tokenizer.piece(end)}", tokens=prompt_ids)
    prompt_ids = tokens[: len(tokens) // 2]
    return Prompt(text=tokenizer.decode(prompt_ids).strip(), tokens=prompt_ids)


def _require_fits(n_tokens: int, context: int, line: Line, what: str) -> None:
    _require(n_tokens <= context, line, f"the {what} has {n_tokens} tokens, the context holds {context} (--context)")


def _require(condition: bool, line: Line, message: str) -> None:
    if not condition:
        raise DataError(f"{line.location}: {message}")
