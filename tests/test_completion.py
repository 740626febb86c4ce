"""The text of a completion begins where its prompt ends: no space that the tokenizer put there, none lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kinds import KINDS, save

from app.completion import Completion, Delta
from app.engine.types import FinishReason, Request, TokenEvent
from model.tokenizer import Tokenizer

WITH_A_SPACE_IN_FRONT = ("mistral", "llama2", "words", "unigram")


class _Stream:
    """The request is all that is asked of it."""

    def __init__(self, prompt: list[int]) -> None:
        self.request = Request(id="r", prompt=tuple(prompt), max_tokens=9)


def _text(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    stream: Any = _Stream(prompt)
    completion, text = Completion(stream, tokenizer, ()), ""
    for index, token in enumerate(ids):
        finish = FinishReason.LENGTH if index == len(ids) - 1 else None
        news = completion._take(TokenEvent("r", index, token, finish=finish), 0.0)
        text += "".join(item.text for item in news if isinstance(item, Delta))
    return text


@pytest.mark.parametrize("kind", WITH_A_SPACE_IN_FRONT)
def test_a_text_from_nothing_begins_without_a_space_and_one_that_goes_on_keeps_it(kind: str, tmp_path: Path) -> None:
    save(KINDS[kind][0](), tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    (ids,) = tokenizer.encode_many(["the fox answered"])
    start = [0 if tokenizer.bos_id is None else tokenizer.bos_id]
    assert _text(tokenizer, start, ids) == "the fox answered"
    assert _text(tokenizer, tokenizer.encode("the moon"), ids) == " the fox answered"


def test_byte_level_text_is_what_the_tokens_say(tmp_path: Path) -> None:
    save(KINDS["gpt2"][0](), tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    (ids,) = tokenizer.encode_many([" the fox"])
    assert _text(tokenizer, [0], ids) == " the fox"
