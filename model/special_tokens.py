"""The names of the tokens that start and end a text, from the files beside a tokenizer.json. Knows no ids.

Whether a text gets them is not read here. Old settings say it too (add_bos_token, add_eos_token), but where there is a
tokenizer.json its post_processor alone decides, as in transformers 5.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from model.files import read_json


def read_names(directory: Path) -> tuple[str | None, str | None]:
    """bos_token and eos_token of tokenizer_config.json, or else of special_tokens_map.json; both files may be absent.

    Raises CheckpointError.
    """
    files = [
        read_json(directory / f"{name}.json", optional=True) for name in ("tokenizer_config", "special_tokens_map")
    ]
    bos, eos = (_text(files[0].get(key)) or _text(files[1].get(key)) for key in ("bos_token", "eos_token"))
    return bos, eos


def _text(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token  # transformers 4 wrote objects
    return token if isinstance(token, str) and token else None
