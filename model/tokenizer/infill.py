"""Fill-in-the-middle tokens of the model families: the order of a prompt's parts, and what ends the middle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class _Vocabulary(Protocol):
    def id_of(self, piece: str) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillFormat:
    """Names of one family's tokens. A prompt is prefix, suffix, middle, or suffix, prefix, middle."""

    prefix: str
    suffix: str
    middle: str = ""
    """Empty if the middle follows the prefix without a token, so that the suffix comes first."""
    suffix_first: bool = False
    ends: tuple[str, ...] = ()
    """Tokens that end the middle where the vocabulary has them, besides the three above and the end of a text."""


_SEPARATORS = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|im_start|>", "<|im_end|>")
INFILL_FORMATS = (
    # Qwen 2.5 Coder, CodeGemma, Granite 3 and 4
    InfillFormat(
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        ends=("<|endoftext|>", *_SEPARATORS),
    ),
    # StarCoder 1 and 2, Granite Code, Stable Code, Refact
    InfillFormat(
        prefix="<fim_prefix>",
        suffix="<fim_suffix>",
        middle="<fim_middle>",
        ends=("<|endoftext|>", "<fim_pad>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>"),
    ),
    # SantaCoder
    InfillFormat(
        prefix="<fim-prefix>", suffix="<fim-suffix>", middle="<fim-middle>", ends=("<|endoftext|>", "<fim-pad>")
    ),
    # Code Llama
    InfillFormat(prefix="\u2581<PRE>", suffix="\u2581<SUF>", middle="\u2581<MID>", ends=("\u2581<EOT>",)),
    # DeepSeek Coder: the hole is where the suffix begins, and the end is where the middle begins
    InfillFormat(
        prefix="<\uff5cfim\u2581begin\uff5c>",
        suffix="<\uff5cfim\u2581hole\uff5c>",
        middle="<\uff5cfim\u2581end\uff5c>",
        ends=("<\uff5cend\u2581of\u2581sentence\uff5c>", "<|EOT|>"),
    ),
    # Seed Coder
    InfillFormat(
        prefix="<[fim-prefix]>",
        suffix="<[fim-suffix]>",
        middle="<[fim-middle]>",
        suffix_first=True,
        ends=("<[end\u2581of\u2581sentence]>",),
    ),
    # Codestral
    InfillFormat(prefix="[PREFIX]", suffix="[SUFFIX]", suffix_first=True, ends=("</s>", "[MIDDLE]")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillTokens:
    """The ids of a vocabulary with fill-in-the-middle tokens."""

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool
    ends: tuple[int, ...]
    """All tokens that end the middle, besides those that end any text."""


INFILL_NAMES = frozenset(
    name for family in INFILL_FORMATS for name in (family.prefix, family.suffix, family.middle) if name
)


def infill_tokens(vocabulary: _Vocabulary) -> InfillTokens | None:
    """The fill-in-the-middle tokens of a tokenizer; None if it lacks them."""
    for family in INFILL_FORMATS:
        prefix, suffix = vocabulary.id_of(family.prefix), vocabulary.id_of(family.suffix)
        middle = vocabulary.id_of(family.middle) if family.middle else None
        if prefix is None or suffix is None or (family.middle and middle is None):
            continue
        ends = (prefix, suffix, middle, *map(vocabulary.id_of, family.ends))
        return InfillTokens(
            prefix=prefix,
            suffix=suffix,
            middle=middle,
            suffix_first=family.suffix_first,
            ends=tuple(dict.fromkeys(end for end in ends if end is not None)),
        )
    return None
