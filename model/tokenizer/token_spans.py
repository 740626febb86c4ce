"""Character spans of the tokens of a text."""

from __future__ import annotations

import json
import operator
from array import array
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

from tokenizers import Encoding
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.processors import PostProcessor

EMPTY_TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    **dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "decoder")),
    "model": {"type": "BPE", "vocab": {}, "merges": []},
}


@dataclass(slots=True)
class Spans:
    """Token i covers text[starts[i]:ends[i]]."""

    ids: array[int] = field(default_factory=lambda: array("I"))
    starts: array[int] = field(default_factory=lambda: array("I"))
    ends: array[int] = field(default_factory=lambda: array("I"))

    def without_first(self) -> Spans:
        """The same spans without the first token."""
        return Spans(self.ids[1:], self.starts[1:], self.ends[1:])


class _Block(NamedTuple):
    ids: array[int]
    gaps: array[int]
    """From the end of the previous token to the start; negative if tokens share a character."""
    lengths: array[int]


_BLOCK_TOKENS = 4096


@dataclass(slots=True, eq=False)
class CompactSpans:
    """Spans of a whole text in three to six bytes per token, for sequential reading.

    Stored in blocks, because a megabyte of text may have a million tokens: handling all of them in one C call would
    hold the GIL for tens of milliseconds, and delay every stream.
    """

    _blocks: list[_Block] = field(default_factory=list)
    _end: int = 0
    """End of the last token."""

    def append(self, spans: Spans, first: int = 0, last: int | None = None, offset: int = 0) -> None:
        """Adds the tokens first:last of a piece that starts at character `offset` of the text."""
        last = len(spans.ids) if last is None else last
        for start in range(first, last, _BLOCK_TOKENS):
            part = slice(start, min(start + _BLOCK_TOKENS, last))
            starts, ends = spans.starts[part], spans.ends[part]
            gaps = map(operator.sub, starts, chain([self._end - offset], ends))
            lengths = map(operator.sub, ends, starts)
            self._blocks.append(_Block(_narrow(spans.ids[part]), _narrow(gaps), _narrow(lengths)))
            self._end = ends[-1] + offset

    def __len__(self) -> int:
        return sum(len(block.ids) for block in self._blocks)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """(id, start, end) of each token."""
        end = 0
        for block in self._blocks:
            for token, gap, length in zip(*block, strict=True):
                start = end + gap
                end = start + length
                yield token, start, end

    def ids(self) -> Iterator[int]:
        """The token ids alone."""
        return chain.from_iterable(block.ids for block in self._blocks)

    def flat(self) -> Spans:
        """The same spans, uncompressed, for random access."""
        spans = Spans()
        for token, start, end in self:
            spans.ids.append(token)
            spans.starts.append(start)
            spans.ends.append(end)
        return spans


def _narrow(numbers: Iterable[int]) -> array[int]:
    """An array of the narrowest type that holds all numbers."""
    wide = array("i", numbers)
    for code in ("b", "H", "h"):
        with suppress(OverflowError):
            return array(code, wide)
    return wide


def spans_of(encoding: Encoding) -> Spans:
    """Spans in characters. Tokens may share a character; an added token has an empty span after its predecessor."""
    spans, last = Spans(), 0
    for index, token in enumerate(encoding.ids):
        start, end = encoding.token_to_chars(index) or (last, last)
        last = max(last, end)
        spans.ids.append(token)
        spans.starts.append(start if end else last)
        spans.ends.append(last)
    return spans


def close_gaps(spans: Spans, length: int) -> None:
    """Extends spans over the characters behind them that no token covers, of a text of `length` characters.

    For tokenizers that compose characters: the library counts a letter and its marks as the letter alone.
    """
    starts, ends = spans.starts, spans.ends
    for index, (end, following) in enumerate(zip(ends, chain(islice(starts, 1, None), [length]), strict=False)):
        if end < following:
            for sharing in range(index, -1, -1):
                if ends[sharing] != end:
                    break
                if starts[sharing] == end:  # an added token, which stays empty
                    starts[sharing] = following
                ends[sharing] = following


def encode_in_pieces(
    encode: Callable[[str], Spans], text: str, piece: int = 1 << 15
) -> Generator[None, None, CompactSpans]:
    """Returns the spans of encode(text), computed in pieces of `piece` characters; yields after each piece.

    A megabyte at once takes 170 MB and holds the GIL, so only the last piece is uncompressed.

    Pieces overlap by an eighth and are joined in the middle of the overlap, where both must have the same tokens:
    pre-tokenization depends on nearby characters. If they disagree (a run of one letter), or if characters are missing
    (a tokenizer that drops unknown characters has wrong offsets from there on), the text is encoded at once.
    """
    joined = yield from _joined(encode, text, piece)
    if joined is None:
        joined = CompactSpans()
        joined.append(encode(text))
    return joined


def run_to_completion(pieces: Generator[None, None, CompactSpans]) -> CompactSpans:
    """Exhausts the generator; returns its result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            spans: CompactSpans = end.value
            return spans


def _joined(encode: Callable[[str], Spans], text: str, piece: int) -> Generator[None, None, CompactSpans | None]:
    """The joined spans; None if two pieces disagree."""
    joined, overlap = CompactSpans(), piece // 8
    step = piece - overlap
    spans, first, offset = encode(text[:piece]), 0, 0
    while offset + piece < len(text):
        yield
        offset += step
        part = text[offset : offset + piece]
        later = encode(part)
        join = _join_point(spans, later, step, overlap)
        if join is None or not _covers(spans, piece) or not _covers(later, len(part)):
            return None
        last, skip = join
        joined.append(spans, first, last, offset - step)
        spans, first = later, skip
    joined.append(spans, first, offset=offset)
    return joined


def _covers(spans: Spans, end: int) -> bool:
    return bool(spans.ends) and spans.ends[-1] == end


def _join_point(early: Spans, late: Spans, offset: int, overlap: int) -> tuple[int, int] | None:
    """(tokens to keep of the early piece, tokens to skip of the late one, which starts at character `offset`)."""
    first, last = overlap // 4, overlap * 3 // 4
    a, b = _starting_between(early, offset + first, offset + last), _starting_between(late, first, last)
    same_ids = [early.ids[i] for i in a] == [late.ids[i] for i in b]
    same_starts = [early.starts[i] for i in a] == [late.starts[i] + offset for i in b]
    middle = len(a) // 2
    return (a[middle], b[middle]) if a and same_ids and same_starts else None


def _starting_between(spans: Spans, first: int, last: int) -> range:
    return range(bisect_left(spans.starts, first), bisect_left(spans.starts, last))


def untrimmed_processor(rust: RustTokenizer) -> PostProcessor | None:
    """The tokenizer's post-processor, changed so that spans include the whitespace of their tokens."""
    processor: PostProcessor | None = rust.post_processor
    serialized = json.dumps(json.loads(rust.to_str())["post_processor"])
    if '"trim_offsets": true' in serialized:
        untrimmed = json.loads(serialized.replace('"trim_offsets": true', '"trim_offsets": false'))
        processor = RustTokenizer.from_str(json.dumps({**EMPTY_TOKENIZER, "post_processor": untrimmed})).post_processor
    return processor
