"""Applies the settings next to a tokenizer.json, as transformers' AutoTokenizer does (transformers 5).

The generic class takes tokenizer.json as it is, and adds the tokens that the settings name. The class of a model family
builds normalizer and pre-tokenizer itself, whatever tokenizer.json says: only the vocabulary and the post-processor
come from the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as RustTokenizer

from model.tokenizer.token_spans import EMPTY_TOKENIZER
from model.tokenizer.tokenizer_settings import ROLES, TokenizerSettings, TokenSettings

_SPACE = "\u2581"
_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_Step = dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _TokenizerClass:
    """How a class of transformers tokenizes, as sections of a tokenizer.json."""

    normalizer: _Step = None
    pre_tokenizer: Callable[[TokenizerSettings], _Step]
    has_byte_fallback: bool = False
    unknown: str | None = None
    """Default unk_token of the model; None if the model has none."""
    defaults: dict[str, str] = field(default_factory=dict)
    """Special tokens by role, if the settings do not name them."""
    others: dict[str, str] = field(default_factory=dict)
    """Special tokens with a role of the class alone."""
    adds_only: tuple[str, ...] | None = None
    """Roles of the tokens that come before every text, instead of what the post_processor says."""
    marks_specials_again: bool = False


def _byte_level(settings: TokenizerSettings, *, use_regex: bool = True) -> dict[str, Any]:
    space = bool(settings.add_prefix_space)
    return {"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": True, "use_regex": use_regex}


def _qwen(settings: TokenizerSettings) -> _Step:
    split = {"type": "Split", "pattern": {"Regex": _QWEN_PATTERN}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(settings, use_regex=False)]}


def _metaspace(scheme: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": False}


def _llama(settings: TokenizerSettings) -> _Step:
    first = "always" if settings.is_legacy else "first"
    return _metaspace("never" if settings.add_prefix_space is False else first)


def _code_llama(settings: TokenizerSettings) -> _Step:
    return _metaspace("never" if settings.add_prefix_space is False else "first")


def _cohere(settings: TokenizerSettings) -> _Step:
    return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(settings)]}


def _gemma(_settings: TokenizerSettings) -> _Step:
    return {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}


_NFC = {"type": "NFC"}
_END = "<|endoftext|>"
_LLAMA_NAMES = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_GPT2 = _TokenizerClass(
    pre_tokenizer=_byte_level, defaults=dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END)
)
_CLASSES = {
    "GPT2Tokenizer": _GPT2,
    "CodeGenTokenizer": _GPT2,
    "GPTNeoXTokenizer": _TokenizerClass(
        normalizer=_NFC,
        pre_tokenizer=_byte_level,
        defaults={**dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END), "pad_token": "<|padding|>"},
        adds_only=(),
    ),
    "Qwen2Tokenizer": _TokenizerClass(
        normalizer=_NFC,
        pre_tokenizer=_qwen,
        defaults=dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END),
        marks_specials_again=True,
    ),
    "CohereTokenizer": _TokenizerClass(
        normalizer=_NFC,
        pre_tokenizer=_cohere,
        defaults={
            "unk_token": "<UNK>",
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "pad_token": "<PAD>",
            "cls_token": "<CLS>",
            "sep_token": "<SEP>",
            "mask_token": "<MASK_TOKEN>",
        },
    ),
    "LlamaTokenizer": _TokenizerClass(pre_tokenizer=_llama, has_byte_fallback=True, defaults=_LLAMA_NAMES),
    "CodeLlamaTokenizer": _TokenizerClass(
        pre_tokenizer=_code_llama,
        has_byte_fallback=True,
        unknown="<unk>",
        defaults=_LLAMA_NAMES,
        others={
            "prefix_token": f"{_SPACE}<PRE>",
            "middle_token": f"{_SPACE}<MID>",
            "suffix_token": f"{_SPACE}<SUF>",
            "eot_token": f"{_SPACE}<EOT>",
            "fill_token": "<FILL_ME>",
        },
        adds_only=("bos_token",),
    ),
    "GemmaTokenizer": _TokenizerClass(
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        pre_tokenizer=_gemma,
        has_byte_fallback=True,
        unknown="<unk>",
        defaults={
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
    ),
}
_MODEL_TYPES = {
    "": "ernie4_5 ernie4_5_moe glm glm4 gpt_bigcode granite granitemoe granitemoehybrid granitemoeshared hyperclovax "
    "internlm3 ministral ministral3 mistral mistral3 nemotron olmo2 olmo3 phi3 stablelm",
    "CohereTokenizer": "cohere cohere2",
    "GPT2Tokenizer": "gpt2 gpt_neo gptj jais2 opt phi starcoder2",
    "GPTNeoXTokenizer": "gpt_neox olmo olmoe",
    "GemmaTokenizer": "gemma gemma2 gemma3 gemma3_text",
    "Qwen2Tokenizer": "qwen2 qwen3 qwen3_moe",
}
_OF_MODEL_TYPE = {model_type: name for name, types in _MODEL_TYPES.items() for model_type in types.split()}
_UNSUPPORTED = frozenset(
    f"{name}Tokenizer"
    for name in (
        *("Albert", "Barthez", "Bert", "BigBird", "Blenderbot", "Camembert", "CLIP", "Deberta", "DebertaV2"),
        *("Electra", "Funnel", "Herbert", "LayoutLM", "MBart", "MBart50", "MPNet", "Nllb", "OpenAIGPT", "Pegasus"),
        *("Reformer", "RemBert", "Roberta", "SeamlessM4T", "Splinter", "T5", "Udop", "Whisper", "XGLM", "XLMRoberta"),
        "XLNet",
    )
)
"""Classes of models that the service does not serve; each builds its own steps."""


def class_of_model_type(model_type: str) -> str | None:
    """The class for files without a tokenizer_class; empty: the generic one, whatever they say; None: it depends."""
    return _OF_MODEL_TYPE.get(model_type)


def with_settings(rust: RustTokenizer, settings: TokenizerSettings) -> RustTokenizer:
    """The tokenizer that transformers makes of a tokenizer.json and its settings. Raises ValueError."""
    if settings.fixes_mistral_regex:
        raise ValueError(
            "fix_mistral_regex of tokenizer_config.json is not supported: save the tokenizer with transformers, which "
            "writes the corrected steps to tokenizer.json, then remove the setting"
        )
    own = rust.get_added_tokens_decoder()
    # As JSON: the library cannot print a long pattern that is not ASCII (DeepSeek LLM's).
    steps = [step.__getstate__() for step in (rust.pre_tokenizer, rust.decoder) if step is not None]
    is_bytewise = any(b"ByteLevel" in step for step in steps)
    chosen = _class_of(TokenizerFacts(is_bpe=isinstance(rust.model, models.BPE), is_bytewise=is_bytewise), settings)
    if chosen is not None:
        rust = _rebuilt(rust, chosen, settings)
    _add_tokens(rust, own, settings, chosen)
    if chosen is not None and chosen.adds_only is not None:
        rust.post_processor = _template(rust, chosen, settings)
    rust.encode_special_tokens = settings.splits_specials
    return rust


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """What the choice of the class takes from tokenizer.json."""

    is_bpe: bool
    is_bytewise: bool


def names_with_defaults(settings: TokenizerSettings, facts: Callable[[], TokenizerFacts]) -> dict[str, str]:
    """Role -> text of its token, with the tokens of the class. `facts` is called only if the class may add some.

    Raises ValueError.
    """
    candidates = map(_CLASSES.get, (class_of_model_type(settings.model_type) or "", settings.class_name))
    if not any(each.others or each.defaults.keys() - settings.roles.keys() for each in candidates if each):
        return settings.names
    chosen = _class_of(facts(), settings)
    own = chosen.defaults | chosen.others if chosen else {}
    return {role: name for role, name in own.items() if role not in settings.roles} | settings.names


def _class_of(facts: TokenizerFacts, settings: TokenizerSettings) -> _TokenizerClass | None:
    """The class that AutoTokenizer chooses; None for the generic one. Raises ValueError."""
    named, of_model = settings.class_name, class_of_model_type(settings.model_type)
    if (
        (named == "LlamaTokenizer" and facts.is_bytewise and settings.model_type != "qwen2")
        or of_model == ""
        or (not named and of_model is None)
    ):
        return None
    name = of_model if not named or settings.model_type == "qwen2" else named
    assert name is not None
    chosen = _CLASSES.get(name)
    if chosen is not None and facts.is_bpe:
        return chosen
    # A model_type alone says little of a tokenizer that its family never had, such as one of words.
    if named and (chosen is not None or name in _UNSUPPORTED) and name == named:
        needs = "is not supported" if chosen is None else "needs a BPE vocabulary, and this one is none"
        raise ValueError(
            f"tokenizer_class {name} of tokenizer_config.json {needs}: set it to PreTrainedTokenizerFast to take "
            "tokenizer.json as it is"
        )
    return None


def _rebuilt(rust: RustTokenizer, chosen: _TokenizerClass, settings: TokenizerSettings) -> RustTokenizer:
    sections = {"normalizer": chosen.normalizer, "pre_tokenizer": chosen.pre_tokenizer(settings)}
    steps = RustTokenizer.from_str(json.dumps({**EMPTY_TOKENIZER, **sections}))
    model = rust.model
    assert isinstance(model, models.BPE)
    unknown = settings.names.get("unk_token", chosen.unknown) if chosen.unknown else None
    model.unk_token = unknown
    model.fuse_unk = model.byte_fallback = chosen.has_byte_fallback
    model.ignore_merges = False
    built = RustTokenizer(model)
    built.normalizer, built.pre_tokenizer = steps.normalizer, steps.pre_tokenizer
    built.post_processor, built.decoder = rust.post_processor, rust.decoder
    return built


def _add_tokens(
    rust: RustTokenizer, own: dict[int, AddedToken], settings: TokenizerSettings, chosen: _TokenizerClass | None
) -> None:
    """Adds the tokens that the files name, in transformers' order, which decides their ids."""
    if settings.added is not None:
        listed = {token: _added_token(item) for token, item in settings.added.items()}
    else:
        listed = {token: _added_token(item) for token, item in settings.legacy_added.items()} | own
    known = {repr(token) for token in rust.get_added_tokens_decoder().values()}
    tokens = [token for _, token in sorted(listed.items()) if repr(token) not in known]
    names = {token.content for token in rust.get_added_tokens_decoder().values()} | {t.content for t in tokens}
    specials = _specials(settings, chosen)
    for item in specials:
        if item.content not in names:
            names.add(item.content)
            tokens.append(_added_token(item, special=True))
    roles = {token.content for role, token in settings.roles.items() if token}
    for token in tokens:
        if token.content in roles:
            token.special = True
    _add_fitting(rust, tokens, settings.vocab_size)
    if chosen is not None and chosen.marks_specials_again:
        again = [item.content for item in specials if rust.token_to_id(item.content) is not None]
        rust.add_tokens([AddedToken(content, special=True) for content in again])


def _specials(settings: TokenizerSettings, chosen: _TokenizerClass | None) -> list[TokenSettings]:
    """The special tokens that the settings or the class name, in the order of their ids if they are new."""
    defaults = {} if chosen is None else chosen.defaults
    implied = {role: TokenSettings(content=name) for role, name in defaults.items() if role not in settings.roles}
    roles = (implied.get(role) or settings.roles.get(role) for role in ROLES)
    own = [TokenSettings(content=name) for name in ({} if chosen is None else chosen.others).values()]
    return [token for token in (*roles, *own, *settings.others.values(), *settings.extras) if token is not None]


def _added_token(token: TokenSettings, *, special: bool | None = None) -> AddedToken:
    is_special = token.special if special is None else special
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=not is_special if token.normalized is None else token.normalized,
        special=is_special,
    )


def _add_fitting(rust: RustTokenizer, tokens: list[AddedToken], vocab_size: int | None) -> None:
    """Adds tokens, except for new ones whose ids the model does not have (a padding token of its training, often)."""
    largest = max(rust.get_added_tokens_decoder(), default=-1)
    next_id = max(largest + 1, rust.get_vocab_size(with_added_tokens=False))
    fitting = []
    for token in tokens:
        if rust.token_to_id(token.content) is None:
            if vocab_size is not None and next_id >= vocab_size:
                continue
            next_id += 1
        fitting.append(token)
    rust.add_tokens(fitting)


def _template(rust: RustTokenizer, chosen: _TokenizerClass, settings: TokenizerSettings) -> Any:
    """The post-processor that adds the tokens of `adds_only`."""
    names = [settings.names.get(role, chosen.defaults.get(role)) for role in chosen.adds_only or ()]
    first = [name for name in names if name is not None and rust.token_to_id(name) is not None]
    if not first:
        return None
    special = {name: {"id": name, "ids": [rust.token_to_id(name)], "tokens": [name]} for name in first}
    single = [
        *({"SpecialToken": {"id": name, "type_id": 0}} for name in first),
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    processor = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    return RustTokenizer.from_str(json.dumps({**EMPTY_TOKENIZER, "post_processor": processor})).post_processor
