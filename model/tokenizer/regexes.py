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
ENGLISH_ENDINGS = r"'s|'t|'re|'ve|'m|'ll|'d"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CL100K_TAIL = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"


def cl100k(number: str) -> str:
    """Words with the mark before them, numbers as the given pattern cuts them, runs of marks, white space."""
    return rf"(?i:{ENGLISH_ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}{_CL100K_TAIL}"


def o200k(number: str, ending: str = "") -> str:
    """Like cl100k(), with words cut before upper case, and an English ending that belongs to its word."""
    lead, tail = r"[^\r\n\p{L}\p{N}]?", rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
    return f"{lead}{_UPPER}*{_LOWER}+{ending}|{lead}{_UPPER}+{_LOWER}*{ending}|{number}{tail}"


GPT2 = rf"{ENGLISH_ENDINGS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
QWEN35 = (
    rf"(?i:{ENGLISH_ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    rf"|\s*[\r\n]+|{_SPACES}"
)
SEED_CODER = (
    rf"(?i:{ENGLISH_ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+"
    rf"|{_SPACES}"
)
JAIS2 = (
    cl100k(r"\p{N}{1,3}").removesuffix(_SPACES)
    + "".join(rf"\s{{{length}}}(?!\S)|" for length in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
    + r"\s{1}"
)
_DEEPSEEK = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
DEEPSEEK_V3 = rf"{_DEEPSEEK}| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
KANA_AND_HAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
_CASED = (
    r"A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}\x{295}-\x{2af}\x{370}-\x{373}\x{376}\x{377}"
    r"\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}\x{38c}\x{38e}-\x{3a1}\x{3a3}-\x{3f5}\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}"
    r"\x{10a0}-\x{10c5}\x{13a0}-\x{13f5}\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}"
    r"\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}"
    r"\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}"
    r"\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d}\x{2124}\x{2126}\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}"
    r"\x{2145}-\x{2149}\x{214e}\x{2183}\x{2184}\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d}\x{a680}-\x{a69b}"
    r"\x{a722}-\x{a76f}\x{a771}-\x{a787}\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}"
    r"\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}"
    r"\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
"""Letters of scripts with upper and lower case that the file of DeepSeek LLM lists; with the characters themselves the
library cannot print the pattern."""
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"(?<!\s)\s+$",  # the file has \s+$, which finds the same, but in quadratic time
    EAST_ASIAN,
)
"""Five cuts, one after another."""

LINEAR_PATTERNS: Mapping[str, str] = {
    GPT2: "GPT-2, GPT-NeoX, Phi-2, OLMo",
    rf"'(?:[sdmt]|ll|ve|re)| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}": "GPT-2 as tiktoken writes it",
    rf"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]"
    rf"|{_SPACES}": "cl100k as tiktoken writes it",
    cl100k(r"\p{N}{1,3}"): "cl100k: Llama 3, Phi-4, GLM-4, OLMo 2, Granite 3",
    cl100k(r"\p{N}"): "Qwen 2, Qwen 2.5, Qwen 3",
    cl100k(r"\p{N}{1,2}"): "nanochat",
    QWEN35: "Qwen 3.5: with combining marks",
    cl100k(r"\p{N}+"): "MiniCPM 5",
    SEED_CODER: "Seed Coder",
    JAIS2: "Jais 2",
    rf"['\u2019](?i:s|t|d|m|re|ve|ll)(?!\p{{L}})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_CL100K_TAIL}": (
        "tokenizers that `inkstream train` makes"
    ),
    o200k(r"\p{N}{1,3}", f"(?i:{ENGLISH_ENDINGS})?"): "o200k: gpt-oss, Llama 4",
    o200k(r"\p{N}"): "Tekken: Mistral NeMo, Mistral Small 3",
    o200k(r"\p{N}{1,3}"): "Tekken with numbers in threes",
    DEEPSEEK_V3: "DeepSeek V2, V3 and R1",
    KANA_AND_HAN: "DeepSeek V3: Chinese and Japanese",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+": "DeepSeek V3, written otherwise",
    **dict.fromkeys(DEEPSEEK_LLM, "DeepSeek LLM"),
    r"\s?\p{L}+": "DeepSeek Coder",
    r"\s?\p{P}+": "DeepSeek Coder",
    BLOOM: "BLOOM",
    r"[0-9][0-9][0-9]": "Falcon",
    rf"{ENGLISH_ENDINGS}|[\p{{L}}]+|[\p{{N}}]|[^\s\p{{L}}\p{{N}}]+": "CLIP",
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
