"""Bounds of what the steps of a tokenizer.json make of a text: a few bytes of JSON can ask for gigabytes.

The tokenizers library does what the file says. Steps that each lengthen a text are multiplied, so a file of a kilobyte
can turn one letter into 10^9, and a post-processor can add as many special tokens as it has references times ids.
"""

from __future__ import annotations

import base64
import binascii
import math
import unicodedata
from collections.abc import Iterator

import msgspec

LONGEST_PIECE = 1 << 12
"""Characters. The library frees the tree of a Unigram vocabulary by recursion: pieces of 250,000 crash the process."""
LARGEST_ID = 2**22
"""No real vocabulary has ids this large."""
MAX_ENTRIES = 1 << 20
"""Tokens and merges; Gemma 3 has 0.78 million. The library holds the GIL while it reads them, for 1 to 1.6 s."""
_MAX_GROWTH = 256
_MAX_DECODED_GROWTH = 16
"""A decoder runs over the whole vocabulary, which may have 64 MiB, and not only over a text."""
_MAX_STEPS = 64
_MAX_ADDED_TOKENS = 1024
_MAX_MAP_BYTES = 4 << 20
"""The map of NFKC that SentencePiece writes has 0.2 MB."""


class TextStep(msgspec.Struct):
    """A normalizer, pre-tokenizer or decoder, or a sequence of them."""

    type: str = ""
    normalizers: list[TextStep] | None = None
    pretokenizers: list[TextStep] | None = None
    decoders: list[TextStep] | None = None
    pattern: dict[str, str] | None = None
    content: str = ""
    prepend: str = ""
    precompiled_charsmap: str = ""


class _Reference(msgspec.Struct):
    id: str


class _Piece(msgspec.Struct):
    """A special token of a template, or else the text."""

    special: _Reference | None = msgspec.field(name="SpecialToken", default=None)


class _SpecialToken(msgspec.Struct):
    ids: list[int]


class Processor(msgspec.Struct):
    """A post-processor, or a sequence of them; `single` is the template of a text."""

    processors: list[Processor] | None = None
    single: list[_Piece] | None = None
    special_tokens: dict[str, _SpecialToken] | None = None


def check_steps(name: str, step: TextStep | None) -> None:
    """Raises ValueError if the section `name` has too many steps, or could make a text far longer."""
    if step is None:
        return
    most = _MAX_DECODED_GROWTH if name == "decoder" else _MAX_GROWTH
    if (count := _count(step)) > _MAX_STEPS:
        raise ValueError(f"the {name} has {count} steps; at most {_MAX_STEPS} are allowed")
    if (growth := _growth(step)) > most:
        raise ValueError(f"the {name} can make text {growth} times as long; at most {most} is allowed")


def check_processors(processor: Processor | None) -> None:
    """Raises ValueError if the post-processor has too many steps, or could add too many tokens to a text."""
    if processor is None:
        return
    if (count := _count(processor)) > _MAX_STEPS:
        raise ValueError(f"the post_processor has {count} steps; at most {_MAX_STEPS} are allowed")
    if (length := _length(processor, 1)) > 1 + _MAX_ADDED_TOKENS:
        raise ValueError(f"the post_processor can add {length - 1} tokens; at most {_MAX_ADDED_TOKENS} are allowed")


# The library ignores fields that a step of its type does not have. The checks read all of them: an empty list of steps
# beside a replacement hides nothing.


def _inner(step: TextStep) -> Iterator[TextStep]:
    for steps in (step.normalizers, step.pretokenizers, step.decoders):
        yield from steps or ()


def _count(step: TextStep | Processor) -> int:
    inner = (step.processors or ()) if isinstance(step, Processor) else _inner(step)
    return 1 + sum(map(_count, inner))


def _growth(step: TextStep) -> int:
    """Upper bound of a text's growth; a few consecutive replacements can exhaust memory.

    Unicode normalization and lower-casing change a text once: later steps of that kind find nothing to expand but what
    a replacement wrote, which _expanded() counts.
    """
    growth = _GROWTH.get(step.type, 1) + _expanded(step.prepend) // _MAX_GROWTH
    if step.precompiled_charsmap:
        growth = max(growth, _growth_of_map(step.precompiled_charsmap))
    if step.pattern is not None:
        # A regular expression, or an empty string, may match before every character.
        pattern_length, length = len(step.pattern.get("String", "")), _expanded(step.content)
        growth = max(growth, -(-length // pattern_length) if pattern_length else 1 + length)
    return growth * math.prod(map(_growth, _inner(step)))


_GROWTH = {"ByteLevel": 4, "BertNormalizer": 3}
"""A character becomes one for each byte of UTF-8; Chinese ones get spaces."""


def _growth_of_map(charsmap: str) -> int:
    """The longest replacement: a tree of what is replaced, its size in front, and the replacements, each with a NUL."""
    try:
        content = base64.b64decode(charsmap, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("the precompiled_charsmap is not base64") from None
    replacements = content[4 + int.from_bytes(content[:4], "little") :]
    if len(replacements) > _MAX_MAP_BYTES:
        raise ValueError(
            f"the precompiled_charsmap has {len(replacements)} bytes; at most {_MAX_MAP_BYTES} are allowed"
        )
    longest = max(replacements.decode("utf-8", "replace").split("\0"), key=_expanded)
    return max(1, _expanded(longest))


def _expanded(text: str) -> int:
    """The most characters that Unicode normalization and lower case make of it."""
    if len(text) > _MAX_MAP_BYTES:
        return len(text)
    return len(unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).lower()))


def _length(processor: Processor, length: int) -> int:
    """Tokens that the post-processor makes of `length` tokens."""
    for inner in processor.processors or ():
        length = _length(inner, length)
    if processor.single is None:
        return length
    ids = {name: len(special.ids) for name, special in (processor.special_tokens or {}).items()}
    names = [piece.special.id if piece.special else None for piece in processor.single]
    return length * names.count(None) + sum(ids.get(name, 0) for name in names if name is not None)
