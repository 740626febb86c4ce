"""Character spans of the tokens of a text."""

from __future__ import annotations

import json
import operator
from array import array
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from tokenizers import Encoding
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.processors import PostProcessor

_SHELL: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    **dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "decoder")),
    "model": {"type": "BPE", "vocab": {}, "merges": []},
}


@dataclass(slots=True)
class Spans:
    """Token i was made of text[starts[i]:ends[i]]."""

    ids: array[int] = field(default_factory=lambda: array("I"))
    starts: array[int] = field(default_factory=lambda: array("I"))
    ends: array[int] = field(default_factory=lambda: array("I"))

    def without_first(self) -> Spans:
        """Leaves out the first token."""
        return Spans(self.ids[1:], self.starts[1:], self.ends[1:])


class _Block(NamedTuple):
    ids: array[int]
    gaps: array[int]
    """From the end of the token before to the start; negative where tokens share a character."""
    lengths: array[int]


_BLOCK_TOKENS = 4096


@dataclass(slots=True, eq=False)
class CompactSpans:
    """Spans of a whole text in three to six bytes for each, to be read in their order.

    In blocks, because a megabyte of text may be a million tokens: one call into C that handled all of them would hold
    the interpreter for tens of milliseconds, and every stream with it.
    """

    _blocks: list[_Block] = field(default_factory=list)
    _end: int = 0
    """Of the last token."""

    def append(self, spans: Spans, first: int = 0, last: int | None = None, offset: int = 0) -> None:
        """Adds the tokens from `first` up to `last` of a piece that begins at character `offset` of the text."""
        last = len(spans.ids) if last is None else last
        for begin in range(first, last, _BLOCK_TOKENS):
            part = slice(begin, min(begin + _BLOCK_TOKENS, last))
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
        """The same spans, to be looked up by their index."""
        spans = Spans()
        for token, start, end in self:
            spans.ids.append(token)
            spans.starts.append(start)
            spans.ends.append(end)
        return spans


def _narrow(numbers: Iterable[int]) -> array[int]:
    """In as few bytes as the largest of them needs."""
    wide = array("i", numbers)
    for code in ("b", "H", "h"):
        with suppress(OverflowError):
            return array(code, wide)
    return wide


def spans_of(encoding: Encoding) -> Spans:
    """In characters. Tokens that share a character both have it; one that was added has none, behind the one before."""
    spans, last = Spans(), 0
    for index, token in enumerate(encoding.ids):
        start, end = encoding.token_to_chars(index) or (last, last)
        last = max(last, end)
        spans.ids.append(token)
        spans.starts.append(start if end else last)
        spans.ends.append(last)
    return spans


def in_pieces(encode: Callable[[str], Spans], text: str, piece: int = 1 << 15) -> Generator[None, None, CompactSpans]:
    """Returns the spans of encode(text), made of pieces of `piece` characters, and yields after each of them.

    A megabyte at once takes 170 MB and holds the interpreter, so only the last piece is flat.

    Pieces overlap by an eighth. They are joined in the middle of it, where both must have the same tokens all around:
    how a text is split depends on what stands near. Where they do not agree (a run of one letter) it is read whole, and
    where characters are missing: a tokenizer that drops what it does not know counts wrongly from there on.
    """
    joined = yield from _joined(encode, text, piece)
    if joined is None:
        joined = CompactSpans()
        joined.append(encode(text))
    return joined


def result_of(pieces: Generator[None, None, CompactSpans]) -> CompactSpans:
    """What in_pieces() returns."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            spans: CompactSpans = end.value
            return spans


def _joined(encode: Callable[[str], Spans], text: str, piece: int) -> Generator[None, None, CompactSpans | None]:
    """None where two pieces do not agree."""
    joined, overlap = CompactSpans(), piece // 8
    step = piece - overlap
    spans, first, begin = encode(text[:piece]), 0, 0
    while begin + piece < len(text):
        yield
        begin += step
        part = text[begin : begin + piece]
        later = encode(part)
        place = _place_to_join(spans, later, step, overlap)
        if place is None or not _reaches(spans, piece) or not _reaches(later, len(part)):
            return None
        last, skip = place
        joined.append(spans, first, last, begin - step)
        spans, first = later, skip
    joined.append(spans, first, offset=begin)
    return joined


def _reaches(spans: Spans, end: int) -> bool:
    return bool(spans.ends) and spans.ends[-1] == end


def _place_to_join(early: Spans, late: Spans, begin: int, overlap: int) -> tuple[int, int] | None:
    """How many tokens to keep of the earlier and to leave out of the later, which begins at character `begin`."""
    first, last = overlap // 4, overlap * 3 // 4
    a, b = _between(early, begin + first, begin + last), _between(late, first, last)
    if not a or [early.ids[i] for i in a] != [late.ids[i] for i in b]:
        return None
    same = [(i, j) for i, j in zip(a, b, strict=True) if early.starts[i] == late.starts[j] + begin]
    # Where a character ends: several tokens may share one.
    clean = [(i, j) for i, j in same if early.ends[i - 1] <= early.starts[i]]
    return clean[len(clean) // 2] if clean and len(same) == len(a) else None


def _between(spans: Spans, first: int, last: int) -> range:
    return range(bisect_left(spans.starts, first), bisect_left(spans.starts, last))


def untrimmed(rust: RustTokenizer) -> PostProcessor | None:
    """The tokenizer's post-processor, but a token's span keeps the white space that its bytes have."""
    processor: PostProcessor | None = rust.post_processor
    written = json.dumps(json.loads(rust.to_str())["post_processor"])
    if '"trim_offsets": true' in written:
        kept = json.loads(written.replace('"trim_offsets": true', '"trim_offsets": false'))
        processor = RustTokenizer.from_str(json.dumps({**_SHELL, "post_processor": kept})).post_processor
    return processor
