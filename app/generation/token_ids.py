"""Check of a prompt's token ids against the model: how many, and which."""

from __future__ import annotations

from app.common.errors import ContextLengthExceeded, InvalidRequest


def check_ids(ids: list[int], *, context: int, vocab_size: int, field: str) -> None:
    """Raises ContextLengthExceeded for more ids than the context holds, InvalidRequest for an unknown one."""
    if len(ids) > context:
        raise ContextLengthExceeded(len(ids), context, field)
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"token id {token} is outside the vocabulary: ids go from 0 to {vocab_size - 1}", field
            )
