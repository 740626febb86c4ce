r"""Decides which tokenizers are proven to run in linear time; all others encode text in a sandboxed process.

The tokenizers library matches regular expressions by backtracking (Oniguruma), so a pattern such as `(\w+\s?)+!` can
take minutes for a few thousand characters. A tokenizer is "proven" where all of it is in the lists below: patterns of
public model families, which a test runs on adversarial texts, and steps that the library implements without a pattern.
Everything else is "unproven": the service encodes text with it only in a process that it kills after a time limit.

The tokenizer's decoder is not checked: this package never runs it (model/tokenizer/token_bytes.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_SPACES = r"\s+(?!\S)|\s+"
_ENDINGS = r"'s|'t|'re|'ve|'m|'ll|'d"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CL100K_TAIL = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"


def _cl100k(number: str) -> str:
    return rf"(?i:{_ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}{_CL100K_TAIL}"


def _o200k(number: str, ending: str = "") -> str:
    lead, tail = r"[^\r\n\p{L}\p{N}]?", rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
    return f"{lead}{_UPPER}*{_LOWER}+{ending}|{lead}{_UPPER}+{_LOWER}*{ending}|{number}{tail}"


_DEEPSEEK = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""

LINEAR_PATTERNS: Mapping[str, str] = {
    rf"{_ENDINGS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}": "GPT-2, GPT-NeoX, Phi-2, OLMo",
    rf"'(?:[sdmt]|ll|ve|re)| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}": "GPT-2 as tiktoken writes it",
    rf"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]"
    rf"|{_SPACES}": "cl100k as tiktoken writes it",
    _cl100k(r"\p{N}{1,3}"): "cl100k: Llama 3, Phi-4, GLM-4, OLMo 2, Granite 3",
    _cl100k(r"\p{N}"): "Qwen 2, Qwen 2.5, Qwen 3",
    _cl100k(r"\p{N}{1,2}"): "nanochat",
    rf"(?i:{_ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    rf"|{_SPACES}": "Qwen 3 with combining marks",
    rf"['\u2019](?i:s|t|d|m|re|ve|ll)(?!\p{{L}})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_CL100K_TAIL}": (
        "tokenizers that `inkstream train` makes"
    ),
    _o200k(r"\p{N}{1,3}", f"(?i:{_ENDINGS})?"): "o200k: gpt-oss, Llama 4",
    _o200k(r"\p{N}"): "Tekken: Mistral NeMo, Mistral Small 3",
    _o200k(r"\p{N}{1,3}"): "Tekken with numbers in threes",
    rf"{_DEEPSEEK}| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}": "DeepSeek V2, V3 and R1",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+": "DeepSeek V3: Chinese and Japanese",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+": "DeepSeek V3, written otherwise",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+": "DeepSeek LLM",
    r"[\r\n]": "DeepSeek LLM: line ends",
    r"\s?\p{L}+": "DeepSeek Coder",
    r"\s?\p{P}+": "DeepSeek Coder",
    " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+": "BLOOM",
    r"[0-9][0-9][0-9]": "Falcon",
    rf"{_ENDINGS}|[\p{{L}}]+|[\p{{N}}]|[^\s\p{{L}}\p{{N}}]+": "CLIP",
    **dict.fromkeys((r"\s", r"\s+", r" +", r" {2,}", r"\n", r"\n+", r"[\r\n]+", r"\S+", r"[^\s]+"), "white space"),
    **dict.fromkeys((r"\d", r"\d+", r"\d{1,3}", r"[0-9]", r"[0-9]+", r"[0-9]{1,3}"), "digits"),
    **dict.fromkeys((r"\p{N}", r"\p{N}+", r"\p{N}{1,3}"), "numbers"),
    **dict.fromkeys(
        (r"\w+|[^\w\s]+", r"\w+", r"\p{L}+", r"\p{P}", r"\p{P}+", r".", r"[\s\S]"), "words, marks, characters"
    ),
}
"""Pattern -> the model families that use it. Each runs in linear time on any text."""

_NORMALIZERS = {"BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled"}
_NORMALIZERS |= {"Prepend", "Strip", "StripAccents"}
_PRE_TOKENIZERS = {"BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace"}
_PRE_TOKENIZERS |= {"Punctuation", "UnicodeScripts", "Whitespace", "WhitespaceSplit"}
_LINEAR_STEPS = {"normalizer": _NORMALIZERS, "pre_tokenizer": _PRE_TOKENIZERS}
_MAX_LITERAL = 64
_MAX_WORD = 256
_MAX_UNIGRAM_PIECE = 64
"""At each character the library walks along the longest piece that may begin there; SentencePiece's have 16."""


@dataclass(frozen=True, slots=True)
class Unproven:
    """Parts of a tokenizer that are not known to run in linear time."""

    patterns: tuple[str, ...] = ()
    """Regular expressions, in the order of the file."""
    others: tuple[str, ...] = ()
    """Descriptions of everything else."""

    def __bool__(self) -> bool:
        return bool(self.patterns or self.others)


def find_unproven(content: Mapping[str, Any]) -> Unproven:
    """Inspects a decoded tokenizer.json; parts of unexpected form count as unproven."""
    patterns, others = [], []
    for section, linear in _LINEAR_STEPS.items():
        for step in _steps(content.get(section)):
            kind = step.get("type")
            pattern = step.get("pattern")
            if kind in ("Split", "Replace") and isinstance(pattern, dict) and len(pattern) == 1:
                regex, literal = pattern.get("Regex"), pattern.get("String")
                if isinstance(regex, str):
                    patterns += [] if regex in LINEAR_PATTERNS else [regex]
                elif not isinstance(literal, str) or len(literal) > _MAX_LITERAL:
                    others.append(f"the {section} searches for a string of more than {_MAX_LITERAL} characters")
            elif not isinstance(kind, str) or kind not in linear:
                others.append(f"the {section} has a step of an unknown type")
    model = content.get("model")
    if isinstance(model, dict) and model.get("type") == "WordPiece":
        longest = model.get("max_input_chars_per_word", 100)
        if not isinstance(longest, int) or longest > _MAX_WORD:
            others.append(f"the model splits words of more than {_MAX_WORD} characters")
    if any(len(piece) > _MAX_UNIGRAM_PIECE for piece in _unigram_pieces(model)):
        others.append(f"the model has pieces of more than {_MAX_UNIGRAM_PIECE} characters")
    if any(map(_strips_itself, content.get("added_tokens") or ())):
        others.append("an added token of white space strips the white space around it")
    return Unproven(tuple(patterns), tuple(others))


def _unigram_pieces(model: Any) -> Iterator[str]:
    vocab = model.get("vocab") if isinstance(model, dict) else None
    for entry in vocab if isinstance(vocab, list) else ():
        if isinstance(entry, list) and entry:
            yield str(entry[0])


def _strips_itself(added: Any) -> bool:
    """Whether the library may search the rest of a text for white space at each of many tokens in a row."""
    if not isinstance(added, dict) or not (added.get("lstrip") or added.get("rstrip")):
        return False
    return bool(added.get("normalized")) or not str(added.get("content", "")).strip()


def _steps(step: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a section, with nested sequences flattened."""
    if step is None:
        return
    if not isinstance(step, dict):
        yield {}
        return
    inner = step.get("normalizers", step.get("pretokenizers"))
    if step.get("type") == "Sequence" and isinstance(inner, list):
        for each in inner:
            yield from _steps(each)
    else:
        yield step
