"""Settings next to a tokenizer.json that change the ids of a text, read as transformers' AutoTokenizer reads them.

tokenizer_config.json, special_tokens_map.json and added_tokens.json name tokens; config.json chooses the class where
tokenizer_config.json does not. add_bos_token and add_eos_token have no effect beside a tokenizer.json, whose
post_processor says what is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from model.files import CheckpointError, read_json
from model.tokenizer.size_limits import LARGEST_ID, LONGEST_PIECE, MAX_ENTRIES
from model.weights_version import Directory, File

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A token that a file names; `is_object` if it also says how the token is found in a text."""

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool | None = None
    special: bool = False
    is_object: bool = False


msgspec.convert({"content": ""}, TokenSettings)  # evaluates the annotations now, not while a hostile file is read


class TokenizerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the files next to a tokenizer.json say."""

    roles: dict[str, TokenSettings | None] = {}
    """bos_token, eos_token, ... in the order of the files; None for null."""
    others: dict[str, TokenSettings] = {}
    """Special tokens with a role of the model's own."""
    extras: list[TokenSettings] = []
    """Special tokens without a role."""
    added: dict[int, TokenSettings] | None = None
    """added_tokens_decoder; None if there is none, so that the tokens of tokenizer.json count."""
    legacy_added: dict[int, TokenSettings] = {}
    """added_tokens.json."""
    class_name: str = ""
    """tokenizer_class without "Fast"."""
    model_type: str = ""
    vocab_size: int | None = None
    """The model's, if config.json says it: it has no use for larger ids."""
    add_prefix_space: bool | None = None
    is_legacy: bool = False
    splits_specials: bool = False
    fixes_mistral_regex: bool = False

    @property
    def names(self) -> dict[str, str]:
        """Role -> text of its token."""
        return {role: token.content for role in ROLES if (token := self.roles.get(role))} | {
            role: token.content for role, token in self.others.items()
        }


def read_settings(directory: Directory) -> TokenizerSettings:
    """Reads and validates the files; any of them may be absent. Raises CheckpointError."""
    path = directory / "tokenizer_config.json"
    config, names, legacy = (
        read_json(directory / f"{name}.json", optional=True)
        for name in ("tokenizer_config", "special_tokens_map", "added_tokens")
    )
    model = read_json(directory / "config.json", optional=True)
    added = _added(path, config["added_tokens_decoder"]) if config.get("added_tokens_decoder") is not None else None
    merged = {**names, **config} if added is not None else {**config, **names}
    extras = merged.get("extra_special_tokens") or merged.get("additional_special_tokens") or []
    roles = {role: _role(path, role, merged[role]) for role in merged if role in ROLES}
    own_roles = {name: value for name, value in merged.items() if _is_own_role(name, value)}
    own_roles |= extras if isinstance(extras, dict) else {}
    others = {name: _token(path, name, value) for name, value in own_roles.items()}
    listed = [] if isinstance(extras, dict) else _list(path, extras)
    # transformers reads additional_special_tokens of special_tokens_map.json after added_tokens.json.
    early = config.get("additional_special_tokens") or merged.get("extra_special_tokens") or []
    early_tokens = _list(path, early) if isinstance(early, list) else []
    named = {token.content for token in (*roles.values(), *early_tokens) if token}
    settings = TokenizerSettings(
        roles=roles,
        others=others,
        extras=listed,
        added=added,
        legacy_added={} if added is not None else _legacy(directory / "added_tokens.json", legacy, named),
        class_name=_text(path, config, "tokenizer_class") or _text(directory / "config.json", model, "tokenizer_class"),
        model_type=model["model_type"] if isinstance(model.get("model_type"), str) else "",
        vocab_size=model["vocab_size"] if type(model.get("vocab_size")) is int else None,
        add_prefix_space=_flag(path, config, "add_prefix_space"),
        is_legacy=bool(_flag(path, config, "legacy")),
        splits_specials=bool(_flag(path, config, "split_special_tokens")),
        fixes_mistral_regex=bool(_flag(path, config, "fix_mistral_regex")),
    )
    count = len(others) + len(listed) + len(added or ()) + len(settings.legacy_added)
    if count > MAX_ENTRIES:
        _refuse(path, f"names {count} tokens; at most {MAX_ENTRIES} are allowed")
    return settings


def _refuse(path: File, problem: str) -> NoReturn:
    raise CheckpointError(f"{path}: {problem}")


def _is_own_role(name: str, value: Any) -> bool:
    return name.endswith("_token") and name not in ROLES and (isinstance(value, str) or _is_token_object(value))


def _is_token_object(value: Any) -> bool:
    return isinstance(value, dict) and value.get("__type") == "AddedToken"


def _role(path: File, name: str, value: Any) -> TokenSettings | None:
    return None if value is None or value == "" else _token(path, name, value)


def _list(path: File, value: Any) -> list[TokenSettings]:
    if not isinstance(value, list):
        _refuse(path, "additional_special_tokens and extra_special_tokens must be lists of tokens")
    return [_token(path, "additional_special_tokens", item) for item in value]


def _added(path: File, value: Any) -> dict[int, TokenSettings]:
    """added_tokens_decoder: id -> token."""
    if not isinstance(value, dict):
        _refuse(path, "added_tokens_decoder must map ids to tokens")
    tokens = {}
    for name, token in value.items():
        if not name.isdecimal() or not name.isascii() or not 0 <= int(name[:9]) < LARGEST_ID or len(name) > 8:
            _refuse(path, f"added_tokens_decoder: {name[:20]!r} is no id from 0 to {LARGEST_ID - 1}")
        if not isinstance(token, dict):
            _refuse(path, f"added_tokens_decoder: the token {name} must be an object with its content")
        tokens[int(name)] = _token(path, "added_tokens_decoder", token)
    return tokens


def _legacy(path: File, value: Mapping[str, Any], special: set[str]) -> dict[int, TokenSettings]:
    """added_tokens.json: token -> id."""
    tokens = {}
    for content, token in value.items():
        if type(token) is not int or not 0 <= token < LARGEST_ID:
            _refuse(path, f"a token needs an id from 0 to {LARGEST_ID - 1}")
        is_special = content in special
        checked = _token(path, "added_tokens", content)
        tokens[token] = msgspec.structs.replace(checked, is_object=True, special=is_special, normalized=not is_special)
    return tokens


def _token(path: File, name: str, value: Any) -> TokenSettings:
    try:
        if isinstance(value, str):
            token = TokenSettings(content=value)
        else:
            token = msgspec.structs.replace(msgspec.convert(value, TokenSettings), is_object=True)
    except (msgspec.ValidationError, UnicodeEncodeError):  # json reads lone surrogates
        _refuse(path, f"{name}: a token must be a string, or an object with its content and true or false for the rest")
    if not token.content.isascii() and any("\ud800" <= character <= "\udfff" for character in token.content):
        _refuse(path, f"{name}: a token is not valid Unicode")
    if len(token.content) > LONGEST_PIECE:
        _refuse(path, f"{name}: a token has {len(token.content)} characters; at most {LONGEST_PIECE} are allowed")
    return token


def _text(path: File, config: Mapping[str, Any], name: str) -> str:
    value = config.get(name)
    if value is not None and not isinstance(value, str):
        _refuse(path, f"{name} must be a string")
    return (value or "").removesuffix("Fast")


def _flag(path: File, config: Mapping[str, Any], name: str) -> bool | None:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        _refuse(path, f"{name} must be true or false")
    return value
