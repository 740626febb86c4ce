"""The header that names the weights which made an answer. Knows no route."""

from __future__ import annotations

NAME = "X-Weights-Version"


def version_header(weights_version: str) -> dict[str, str]:
    """For an answer's headers."""
    return {NAME: weights_version}
