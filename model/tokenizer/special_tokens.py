"""The names of the tokens that start and end a text, and their like: from the files beside a tokenizer.json. No ids.

Whether a text gets them is not read here. Old settings say it too (add_bos_token, add_eos_token), but where there is a
tokenizer.json its post_processor alone decides, as in transformers 5.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from model.files import read_json

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_names(directory: Path) -> dict[str, str]:
    """What tokenizer_config.json, or else special_tokens_map.json, calls "bos_token", "eos_token" and their like.

    Either file may be absent; what has no name is not there. Raises CheckpointError.
    """
    files = [
        read_json(directory / f"{name}.json", optional=True) for name in ("tokenizer_config", "special_tokens_map")
    ]
    names = {role: _text(files[0].get(role)) or _text(files[1].get(role)) for role in _ROLES}
    return {role: name for role, name in names.items() if name}


def _text(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token  # transformers 4 wrote objects
    return token if isinstance(token, str) and token else None
