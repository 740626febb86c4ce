"""Where in a text its tokens stand. Knows no vocabulary and no bytes."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.processors import PostProcessor

_SHELL: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    **dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "decoder")),
    "model": {"type": "BPE", "vocab": {}, "merges": []},
}


@dataclass(frozen=True, slots=True)
class Spans:
    """Token i was made of text[starts[i]:ends[i]]. Flat, because a megabyte of text may be a million tokens."""

    ids: array[int] = field(default_factory=lambda: array("I"))
    starts: array[int] = field(default_factory=lambda: array("I"))
    ends: array[int] = field(default_factory=lambda: array("I"))


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


def untrimmed(rust: RustTokenizer) -> PostProcessor | None:
    """The tokenizer's post-processor, but a token's span keeps the white space that its bytes have."""
    processor: PostProcessor | None = rust.post_processor
    written = json.dumps(json.loads(rust.to_str())["post_processor"])
    if '"trim_offsets": true' in written:
        kept = json.loads(written.replace('"trim_offsets": true', '"trim_offsets": false'))
        processor = RustTokenizer.from_str(json.dumps({**_SHELL, "post_processor": kept})).post_processor
    return processor
