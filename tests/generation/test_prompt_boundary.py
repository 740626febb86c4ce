"""The text of a completion begins where its prompt ends: no space that the tokenizer put there, none lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.common.types import FinishReason, Request, SampledEvent
from app.generation.detokenizer import OutputChoice, TextRules
from model.tokenizer.tokenizer import Tokenizer
from tests.support.model.sample_tokenizers import KINDS, save

WITH_A_SPACE_IN_FRONT = ("mistral", "llama2", "words", "unigram")


def _text(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    request = Request(id="r", prompt=tuple(prompt), max_tokens=9)
    choice, text = OutputChoice(0, request, tokenizer, TextRules()), ""
    for index, token in enumerate(ids):
        finish = FinishReason.LENGTH if index == len(ids) - 1 else None
        text += "".join(delta.text for delta in choice.add(SampledEvent("r", index, token, finish=finish)))
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
