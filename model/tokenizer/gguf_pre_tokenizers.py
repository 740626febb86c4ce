"""Steps of the byte-level tokenizers that a GGUF file names in tokenizer.ggml.pre, as their tokenizer.json has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.tokenizer import regexes

Step = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteLevelSteps:
    """What a family's tokenizer does to a text before the merges."""

    cuts: tuple[Step, ...]
    """Steps of the pre-tokenizer, with the one that writes a text as bytes."""
    composes: bool = False
    """Whether it composes characters (NFC)."""
    ignores_merges: bool = False
    """Whether a word of the vocabulary is one token, whatever the merges make of it."""
    adds_bos: bool = False
    """What holds where the file has no add_bos_token."""

    @property
    def normalizer(self) -> Step | None:
        """The section of tokenizer.json."""
        return {"type": "NFC"} if self.composes else None

    @property
    def pre_tokenizer(self) -> Step:
        """The section of tokenizer.json."""
        return {"type": "Sequence", "pretokenizers": list(self.cuts)}


def split(pattern: str) -> Step:
    """A step that makes each match of the pattern a word of its own."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _digits(*, individual: bool = True) -> Step:
    return {"type": "Digits", "individual_digits": individual}


def _bytewise(*, cuts_words: bool) -> Step:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": cuts_words}


_AS_BYTES, _GPT2 = _bytewise(cuts_words=False), _bytewise(cuts_words=True)


def _splits(*patterns: str, **fields: bool) -> ByteLevelSteps:
    return ByteLevelSteps(cuts=(*map(split, patterns), _AS_BYTES), **fields)


_TRIPLES = r"\p{N}{1,3}"
_CL100K, _QWEN = regexes.cl100k(_TRIPLES), regexes.cl100k(r"\p{N}")
_ENDING = f"(?i:{regexes.ENGLISH_ENDINGS})?"

_FAMILIES: Mapping[str, ByteLevelSteps] = {
    "gpt-2 phi-2 jais mellum exaone4 trillion gigachat a.x-4.0 granite-docling": ByteLevelSteps(cuts=(_GPT2,)),
    "olmo mpt": ByteLevelSteps(cuts=(_GPT2,), composes=True),
    "starcoder refact smollm codeshell exaone minerva-7b mellum2": ByteLevelSteps(cuts=(_digits(), _GPT2)),
    "command-r": ByteLevelSteps(cuts=(_digits(), _GPT2), composes=True),
    "falcon": ByteLevelSteps(
        cuts=(
            {"type": "Punctuation", "behavior": "Contiguous"},
            _GPT2,
            _digits(individual=False),
            split("[0-9][0-9][0-9]"),
        ),
    ),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": _splits(
        _CL100K, ignores_merges=True, adds_bos=True
    ),
    "smaug-bpe": _splits(_CL100K, ignores_merges=True),
    "dbrx chatglm-bpe glm4": _splits(_CL100K),
    "qwen2 deepseek-r1-qwen f2llmv2 kormo megrez hunyuan stablelm2": _splits(_QWEN, composes=True),
    "qwen35": _splits(regexes.QWEN35, composes=True),
    "gpt-4o llama4 kanana2 minimax-m2": _splits(regexes.o200k(_TRIPLES, _ENDING), ignores_merges=True),
    "tekken": _splits(regexes.o200k(r"\p{N}"), ignores_merges=True, adds_bos=True),
    "deepseek-v3 hunyuan-dense joyai-llm": _splits(_TRIPLES, regexes.KANA_AND_HAN, regexes.DEEPSEEK_V3),
    "deepseek-llm": ByteLevelSteps(cuts=(*map(split, regexes.DEEPSEEK_LLM), _digits(), _AS_BYTES)),
    "deepseek-coder": ByteLevelSteps(
        cuts=(
            *map(split, (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", regexes.EAST_ASIAN)),
            _digits(),
            _AS_BYTES,
        )
    ),
    "seed-coder": _splits(regexes.SEED_CODER),
    "minicpm5": _splits(_TRIPLES, regexes.cl100k(r"\p{N}+"), ignores_merges=True),
    "jais-2": _splits(regexes.JAIS2),
    "bloom poro-chat gpt3-finnish": _splits(regexes.BLOOM),
    "viking": _splits(regexes.BLOOM, r"\p{N}"),
}
BYTE_LEVEL_STEPS: Mapping[str, ByteLevelSteps] = {
    name: steps for names, steps in _FAMILIES.items() for name in names.split()
}
"""Value of tokenizer.ggml.pre -> steps."""

_OF_ARCHITECTURE: Mapping[str, str] = {
    "command-r": "command-r",
    "falcon": "falcon",
    "gpt2": "gpt-2",
    "gptj": "gpt-2",
    "gptneox": "olmo",
    "mpt": "mpt",
    "olmo": "olmo",
    "phi2": "phi-2",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2",
    "refact": "refact",
    "starcoder": "starcoder",
    "starcoder2": "starcoder",
}
"""Architectures whose models all have one tokenizer, for files from before April 2024, which do not name it."""


def byte_level_steps(pre: str, architecture: str) -> ByteLevelSteps:
    """The steps for a value of tokenizer.ggml.pre, which is empty if the file has none. Raises ValueError."""
    name = _OF_ARCHITECTURE.get(architecture, "") if pre in ("", "default") else pre
    if name in BYTE_LEVEL_STEPS:
        return BYTE_LEVEL_STEPS[name]
    allowed = f"use a file with one of {', '.join(sorted(BYTE_LEVEL_STEPS))}"
    if name:
        raise ValueError(f"tokenizer.ggml.pre is {name[:40]!r}, which is not supported: {allowed}")
    raise ValueError(
        f"tokenizer.ggml.pre does not say how the tokenizer cuts text, and the architecture {architecture[:40]!r} has "
        f"several ways (files from before April 2024 lack it): {allowed}"
    )
