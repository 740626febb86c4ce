"""Where tokens stand in their text, and the text that a list of tokens is, for every kind of tokenizer."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import processors

from model.tokenizer.token_spans import CompactSpans, Spans, encode_in_pieces, run_to_completion
from model.tokenizer.tokenizer import Tokenizer
from tests.model.tokenizer.test_tokenizer_kinds import _TEXTS, LOSSLESS, pair
from tests.support.model.sample_tokenizers import KINDS, gpt2


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=30)
@given(text=_TEXTS)
def test_spans_go_through_the_text_from_its_start_to_its_end(name: str, text: str) -> None:
    ours, _ = pair(name)
    spans = ours.encode_spans(text).flat()
    assert spans.ids.tolist() == ours.encode(text)
    assert list(ours.encode_spans(text, add_special_tokens=False).ids()) == ours.encode_many([text])[0]
    assert list(spans.starts) == sorted(spans.starts)
    assert list(spans.ends) == sorted(spans.ends)
    assert all(start <= end <= len(text) for start, end in zip(spans.starts, spans.ends, strict=True))
    covered = {i for start, end in zip(spans.starts, spans.ends, strict=True) for i in range(start, end)}
    if name in LOSSLESS:
        assert covered == set(range(len(text)))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("piece", [256, 1024])
@settings(max_examples=10)
@example(texts=["Ta", "00 \n"], more="a")
@given(texts=st.lists(_TEXTS, min_size=1, max_size=8), more=st.sampled_from(["a", " ", "the fox ", "\U0001f98a", "\n"]))
def test_pieces_give_the_tokens_of_the_whole(name: str, piece: int, texts: list[str], more: str) -> None:
    ours, _ = pair(name)
    text = "".join((text + more * 40) * 3 for text in texts)

    def encode(part: str) -> Spans:
        seen.append(len(part))
        return ours.encode_spans(part).flat()

    seen: list[int] = []
    assert list(run_to_completion(encode_in_pieces(encode, text, piece))) == list(ours.encode_spans(text))
    assert len(seen) > 1 or len(text) <= piece


def test_a_long_text_is_not_read_in_one() -> None:
    ours, _ = pair("gpt2")
    longest = 0

    def encode(part: str) -> Spans:
        nonlocal longest
        longest = max(longest, len(part))
        return ours.encode_spans(part).flat()

    text = "Once upon a time there was a fox. " * 300
    assert list(run_to_completion(encode_in_pieces(encode, text, 1024))) == list(ours.encode_spans(text))
    assert longest == 1024


def test_flat_and_compact_spans_are_the_same_tokens() -> None:
    starts = [0, 0, 3, 70_000, 70_000, 70_300]
    ends = [3, 3, 70_000, 70_000, 70_300, 70_301]
    piece = Spans(array("I", [1, 2, 70_000, 4, 300, 6]), array("I", starts), array("I", ends))
    spans = CompactSpans()
    spans.append(piece, 0, 4, offset=10)
    spans.append(piece, 4, offset=10)
    assert list(spans) == [(t, s + 10, e + 10) for t, s, e in zip(piece.ids, starts, ends, strict=True)]
    assert list(spans.ids()) == spans.flat().ids.tolist() == piece.ids.tolist()
    assert len(spans) == 6 and len(CompactSpans()) == 0


@pytest.mark.parametrize("name", ["gpt2", "llama3", "gemma"])
@settings(max_examples=30)
@given(text=_TEXTS)
def test_whole_characters_stand_where_their_token_says(name: str, text: str) -> None:
    ours, _ = pair(name)
    spans = ours.encode_spans(text, add_special_tokens=False).flat()
    for token, start, end in zip(spans.ids, spans.starts, spans.ends, strict=True):
        data = ours.token_bytes(token)
        assert data in text[start:end].encode()
        if data.decode(errors="ignore").encode() == data:
            assert data == text[start:end].encode()


def test_special_tokens_are_written_and_found_again() -> None:
    ours, _ = pair("llama2")
    text = "<s>a fox</s>"
    ids = ours.encode(text)
    assert b"".join(ours.iter_with_specials(ids)) == text.encode()
    assert ours.specials == {0: "<unk>", 1: "<s>", 2: "</s>"}
    spans = ours.encode_spans(text).flat()
    assert spans.ids.tolist() == ids, "one BOS, as in encode()"
    assert (spans.starts[0], spans.ends[0]) == (0, 3)
    assert (spans.starts[-1], spans.ends[-1]) == (8, 12)
    assert b"".join(ours.iter_with_specials([10**6])) == b"", "an id that only the model has"


def test_what_is_added_to_a_text_stands_nowhere_in_it() -> None:
    rust = gpt2()
    rust.add_special_tokens(["<a>", "<z>"])
    around = [(name, rust.token_to_id(name)) for name in ("<a>", "<z>")]
    rust.post_processor = processors.TemplateProcessing(single="<a> $A <z>", special_tokens=around)
    spans = Tokenizer(rust).encode_spans("caf\u00e9").flat()
    assert (spans.starts[0], spans.ends[0], spans.starts[-1], spans.ends[-1]) == (0, 0, 4, 4)
    empty = Tokenizer(rust).encode_spans("").flat()
    assert (empty.ids.tolist(), empty.ends.tolist()) == ([around[0][1], around[1][1]], [0, 0])


@pytest.mark.parametrize("nested", [False, True])
def test_a_space_belongs_to_the_token_that_has_its_byte(nested: bool) -> None:
    """Some files ask for spans without the space before a word."""
    rust = gpt2()
    trims = processors.ByteLevel(trim_offsets=True)
    rust.post_processor = processors.Sequence([trims]) if nested else trims
    assert rust.encode("a  the").offsets[-1] == (3, 6)
    spans = Tokenizer(rust).encode_spans("a  the").flat()
    assert list(zip(spans.starts, spans.ends, strict=True)) == [(0, 1), (1, 2), (2, 6)]
