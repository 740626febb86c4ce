"""Tokenizer of a GGUF file: the files of a weights directory that its metadata describe.

tokenizer_files() gives what the original model's tokenizer.json and tokenizer_config.json say about text; stop_ids()
gives the tokens that end a text. The metadata are untrusted: sizes are bounded, and each error is one line.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any

from model.tokenizer.gguf_merges import merges_from_scores
from model.tokenizer.gguf_pre_tokenizers import Step, byte_level_steps
from model.tokenizer.gguf_vocabulary import (
    CHARACTER_MAP,
    PREFIX,
    GgufVocabulary,
    TokenType,
    flag_field,
    read_vocabulary,
    text_field,
)
from model.tokenizer.token_spans import EMPTY_TOKENIZER
from model.tokenizer.tokenizer import MAX_BYTES

_SPACE = "\u2581"
_MAX_TEMPLATE_BYTES = 1 << 20
_MAX_TEMPLATES = 16
_MAX_MAP_BYTES = 8 << 20
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_CONFIG_ROLES = {"bos": "bos_token", "eos": "eos_token", "unk": "unk_token", "pad": "pad_token"}

_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
        *("<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>", "<turn|>", "<|tool_response>"),
        *("<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
    }
)
"""Tokens that end a text whatever their type is: no vocabulary learns them as words."""
_ENDS_IF_CONTROL = frozenset(("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"))
"""Tokens that may be words instead: Gemma has </s>, a tag of HTML."""
_MESSAGE_ENDS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
"""Beside these, <|end|> ends a message and not the text (gpt-oss, Solar Open)."""


def tokenizer_files(metadata: Mapping[str, Any], vocabulary: GgufVocabulary | None = None) -> dict[str, bytes]:
    """File name -> content: tokenizer.json, tokenizer_config.json, and chat_template.jinja if there is a template.

    Named templates go to tokenizer_config.json instead, where their readers look. vocabulary: of these metadata, if it
    was read before. Raises ValueError.
    """
    vocabulary = vocabulary or read_vocabulary(metadata)
    template, variants = _templates(metadata)
    roles = {
        name: vocabulary.tokens[vocabulary.roles[role]]
        for role, name in _CONFIG_ROLES.items()
        if role in vocabulary.roles
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **roles,
        "clean_up_tokenization_spaces": False,
    }
    if variants:
        named = {"default": template, **variants} if template else variants
        config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    files = {"tokenizer.json": _tokenizer_json(vocabulary, metadata), "tokenizer_config.json": _json(config)}
    if template and not variants:
        files["chat_template.jinja"] = template.encode()
    if (size := len(files["tokenizer.json"])) > MAX_BYTES:
        raise ValueError(f"the tokenizer has {size} bytes as tokenizer.json; at most {MAX_BYTES} are allowed")
    return files


def stop_ids(vocabulary: GgufVocabulary) -> tuple[int, ...]:
    """Ids of the tokens that end a text, eos first: by role and by name, as llama.cpp chooses them.

    Without those that only separate files, which end the middle of an infill (model/tokenizer/infill.py).
    """
    named = list(_named_ends(vocabulary))
    texts = {vocabulary.tokens[token] for token in named}
    if any(ends <= texts for ends in _MESSAGE_ENDS):
        named = [token for token in named if vocabulary.tokens[token] != "<|end|>"]
    roles = [vocabulary.roles.get(role) for role in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(token for token in (*roles, *named) if token is not None))


def _named_ends(vocabulary: GgufVocabulary) -> Iterator[int]:
    for token, text in enumerate(vocabulary.tokens):
        is_control = vocabulary.types[token] == TokenType.CONTROL
        if text in _ENDS or (text in _ENDS_IF_CONTROL and is_control):
            yield token


def _templates(metadata: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The chat template, and the named ones."""
    field = "tokenizer.chat_template"
    names = [name for name in metadata if name == field or name.startswith(f"{field}.")]
    if len(names) > _MAX_TEMPLATES:
        raise ValueError(f"there are {len(names)} chat templates; at most {_MAX_TEMPLATES} are allowed")
    templates = {name.removeprefix(field).removeprefix("."): text_field(metadata, name) for name in names}
    if (size := sum(len(text.encode()) for text in templates.values())) > _MAX_TEMPLATE_BYTES:
        raise ValueError(f"{field} has {size} bytes; at most {_MAX_TEMPLATE_BYTES} are allowed")
    return templates.pop("", "") or templates.pop("default", ""), templates


def _tokenizer_json(vocabulary: GgufVocabulary, metadata: Mapping[str, Any]) -> bytes:
    sections = {"gpt2": _byte_level, "llama": _sentencepiece, "t5": _unigram}[vocabulary.kind]
    content, adds_bos = sections(vocabulary, metadata)
    defaults = {"bos": adds_bos, "eos": vocabulary.kind == "t5"}
    adds = {role: _adds(metadata, vocabulary, role, default=default) for role, default in defaults.items()}
    return _json({**EMPTY_TOKENIZER, **content, "post_processor": _post_processor(vocabulary, adds)})


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _byte_level(vocabulary: GgufVocabulary, _metadata: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    steps = byte_level_steps(vocabulary.pre, vocabulary.architecture)
    added = _added_tokens(vocabulary, vocabulary.tokens)
    content = {
        "added_tokens": added,
        "normalizer": steps.normalizer,
        "pre_tokenizer": steps.pre_tokenizer,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE",
            "ignore_merges": steps.ignores_merges,
            "vocab": _learned(vocabulary, vocabulary.tokens, added),
            "merges": vocabulary.merges,
        },
    }
    return content, steps.adds_bos


def _sentencepiece(vocabulary: GgufVocabulary, metadata: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    tokens = [_respelled(vocabulary, token) for token in range(len(vocabulary.tokens))]
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"{PREFIX}tokens has a run of spaces twice, as spaces and as U+2581; each token must differ")
    adds_space = flag_field(metadata, f"{PREFIX}add_space_prefix", default=True)
    merges = vocabulary.merges or merges_from_scores(vocabulary, tokens, longest_first=not adds_space)
    unknown = _unknown_id(vocabulary)
    cuts_at_tools = adds_space and "[INST]" in {tokens[token] for token in vocabulary.ids_of_type(TokenType.CONTROL)}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if adds_space and not cuts_at_tools else []
    metaspace = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "first", "split": False}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
    content = {
        "added_tokens": _added_tokens(vocabulary, tokens),
        "normalizer": _sequence(
            "normalizers", [*_extra_spaces(metadata), *prepend, *([] if cuts_at_tools else [replace])]
        ),
        "pre_tokenizer": metaspace if cuts_at_tools else None,
        "decoder": _sequence(
            "decoders",
            [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        ),
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": set(tokens) >= _BYTES,
            "vocab": {text: token for token, text in enumerate(tokens) if not vocabulary.is_placeholder(token)},
            "merges": merges,
        },
    }
    return content, True


def _unigram(vocabulary: GgufVocabulary, metadata: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    adds_space = flag_field(metadata, f"{PREFIX}add_space_prefix", default=False)
    scheme = "always" if adds_space else "never"
    metaspace = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": True}
    content = {
        "added_tokens": _added_tokens(vocabulary, vocabulary.tokens),
        "normalizer": _sequence("normalizers", [*_character_map(metadata), *_extra_spaces(metadata)]),
        "pre_tokenizer": metaspace,
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": _unknown_id(vocabulary),
            "byte_fallback": set(vocabulary.tokens) >= _BYTES,
            "vocab": list(zip(vocabulary.tokens, vocabulary.scores, strict=True)),
        },
    }
    return content, False


def _sequence(name: str, steps: list[Step]) -> Step | None:
    return {"type": "Sequence", name: steps} if steps else None


def _respelled(vocabulary: GgufVocabulary, token: int) -> str:
    """The token as SentencePiece writes it: converters write U+2581 as a space in tokens that the user defined."""
    text = vocabulary.tokens[token]
    is_run = vocabulary.types[token] == TokenType.USER_DEFINED and not text.strip(" ")
    return text.replace(" ", _SPACE) if is_run else text


def _learned(vocabulary: GgufVocabulary, tokens: list[str] | Any, added: list[dict[str, Any]]) -> dict[str, int]:
    """The vocabulary of the merges: all tokens but placeholders and the added tokens that follow the others.

    The library numbers added tokens that the vocabulary does not have from its end on.
    """
    added_ids = {item["id"] for item in added}
    merged = {piece for pair in vocabulary.merges for piece in (*pair, pair[0] + pair[1])}
    kept = [
        token
        for token, text in enumerate(tokens)
        if not vocabulary.is_placeholder(token) and (token not in added_ids or text in merged)
    ]
    end = kept[-1] + 1 if kept else 0
    late = [token for token in sorted(added_ids) if token >= end]
    contiguous = {token for index, token in enumerate(late) if token == end + index}
    return {tokens[token]: token for token in sorted({*kept, *added_ids} - contiguous)}


def _unknown_id(vocabulary: GgufVocabulary) -> int | None:
    """The token for text that no other token covers."""
    of_type = vocabulary.ids_of_type(TokenType.UNKNOWN)
    return vocabulary.roles.get("unk", of_type[0] if of_type else None)


def _extra_spaces(metadata: Mapping[str, Any]) -> list[Step]:
    """Normalizers that drop spaces around a text, and all but one of several."""
    if not flag_field(metadata, f"{PREFIX}remove_extra_whitespaces", default=False):
        return []
    strip = {"type": "Strip", "strip_left": True, "strip_right": True}
    return [strip, {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]


def _character_map(metadata: Mapping[str, Any]) -> list[Step]:
    """The normalizer of a SentencePiece model's map of characters."""
    name = CHARACTER_MAP
    value = metadata.get(name, b"")
    if not isinstance(value, bytes | bytearray | list | tuple):
        raise ValueError(f"{name} must be a list of bytes")
    if len(value) > _MAX_MAP_BYTES:
        raise ValueError(f"{name} has {len(value)} bytes; at most {_MAX_MAP_BYTES} are allowed")
    if not all(type(byte) is int and -128 <= byte < 256 for byte in value):
        raise ValueError(f"{name} must be a list of bytes")
    content = bytes(byte & 0xFF for byte in value)
    if not content:
        return []
    if len(content) <= 4 + int.from_bytes(content[:4], "little"):
        raise ValueError(f"{name} ends inside its table; the file is damaged")
    return [{"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}]


def _added_tokens(vocabulary: GgufVocabulary, tokens: Any) -> list[dict[str, Any]]:
    """Tokens that are found in a text before it is cut: special ones, and those that the user defined."""
    special = {*vocabulary.ids_of_type(TokenType.CONTROL, TokenType.UNKNOWN), *_named_ends(vocabulary)}
    strips = special - {vocabulary.roles.get("unk"), vocabulary.roles.get("bos")} if _is_phi3(vocabulary) else set()
    return [
        {
            "id": token,
            "content": tokens[token],
            "single_word": False,
            "lstrip": False,
            "rstrip": token in strips and tokens[token] not in ("<unk>", "<s>", "<|endoftext|>"),
            "normalized": False,
            "special": token in special,
        }
        for token in sorted({*special, *vocabulary.ids_of_type(TokenType.USER_DEFINED)})
    ]


def _is_phi3(vocabulary: GgufVocabulary) -> bool:
    """Phi 3 strips the white space after its tokens, which the metadata cannot say."""
    return vocabulary.architecture == "phi3" and vocabulary.kind == "llama"


def _adds(metadata: Mapping[str, Any], vocabulary: GgufVocabulary, role: str, *, default: bool) -> bool:
    """Whether the tokenizer puts the token of a role around a text."""
    has_token = role in vocabulary.roles
    adds = flag_field(metadata, f"{PREFIX}add_{role}_token", default=default and has_token)
    if adds and not has_token:
        raise ValueError(f"{PREFIX}add_{role}_token is true, but there is no {PREFIX}{role}_token_id")
    return adds


def _post_processor(vocabulary: GgufVocabulary, adds: Mapping[str, bool]) -> Step | None:
    """The template that puts tokens around a text."""
    names = {role: vocabulary.tokens[vocabulary.roles[role]] for role, is_added in adds.items() if is_added}
    if not names:
        return None

    def around(text: str, type_id: int) -> list[Step]:
        special = {role: {"SpecialToken": {"id": name, "type_id": type_id}} for role, name in names.items()}
        pieces = [special.get("bos"), {"Sequence": {"id": text, "type_id": type_id}}, special.get("eos")]
        return [piece for piece in pieces if piece]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            name: {"id": name, "ids": [vocabulary.roles[role]], "tokens": [name]} for role, name in names.items()
        },
    }
