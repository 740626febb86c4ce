"""The names of the tokens that start and end a text, from the files beside a tokenizer.json. Knows no ids.

Whether a text gets them is not read here. Old settings say it too (add_bos_token, add_eos_token), but where there is a
tokenizer.json its post_processor alone decides, as in transformers 5.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_names(directory: Path) -> tuple[str | None, str | None]:
    """bos_token and eos_token of tokenizer_config.json, or else of special_tokens_map.json; both files may be absent.

    Raises ValueError naming the file that cannot be read.
    """
    settings, fallback = _read(directory / "tokenizer_config.json"), _read(directory / "special_tokens_map.json")
    bos, eos = (_text(settings.get(key)) or _text(fallback.get(key)) for key in ("bos_token", "eos_token"))
    return bos, eos


def one_line(error: BaseException) -> str:
    """What was wrong, for the end of a message to people."""
    return str(getattr(error, "strerror", None) or error).splitlines()[0][:200] if str(error) else type(error).__name__


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read ({one_line(error)})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold one JSON object")
    return content


def _text(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token  # transformers 4 wrote objects
    return token if isinstance(token, str) and token else None
