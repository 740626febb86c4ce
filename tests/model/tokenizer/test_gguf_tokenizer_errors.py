"""Damaged and hostile tokenizer metadata of a GGUF file: one line, bounded time, no traceback."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from model.tokenizer import gguf_vocabulary
from model.tokenizer.gguf_tokenizer import stop_ids, tokenizer_files
from model.tokenizer.gguf_vocabulary import read_vocabulary
from tests.model.tokenizer.test_gguf_tokenizer import byte_level_metadata, load, sentencepiece_metadata

_ABSENT = object()


def ggml(**fields: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def changed(metadata: dict[str, Any], name: str, index: int, value: Any) -> dict[str, Any]:
    values = list(metadata[f"tokenizer.ggml.{name}"])
    values[index] = value
    return ggml(**{name: values})


def with_token(text: Any, index: int = 9) -> dict[str, Any]:
    return changed(sentencepiece_metadata(), "tokens", index, text)


BOTH: dict[str, tuple[dict[str, Any], str]] = {
    "no kind": (ggml(model=_ABSENT), "model is missing, so the file has no tokenizer: use a file with gpt2"),
    "bert": (ggml(model="bert"), r"model is 'bert' \(WordPiece tokenizer\), which is not supported: use"),
    "rwkv": (ggml(model="rwkv"), r"model is 'rwkv' \(RWKV tokenizer\)"),
    "another kind": (ggml(model="x" * 10**6), "model is 'x{40}', which is not supported"),
    "kind of another type": (ggml(model=7), "model must be a string"),
    "no tokens": (ggml(tokens=_ABSENT), "tokens is missing"),
    "empty vocabulary": (ggml(tokens=[]), "tokens is empty"),
    "tokens of another type": (ggml(tokens="abc"), "tokens must be a list"),
    "token of another type": (with_token(7), r"tokens\[9\] must be a string"),
    "token that is not UTF-8": (with_token(b"\xff\xfe"), r"tokens\[9\] is not UTF-8"),
    "lone surrogate": (with_token("\ud800"), r"tokens\[9\] is not UTF-8"),
    "duplicate token": (with_token("<s>"), "has '<s>' twice, as 1 and 9"),
    "endless token": (with_token("a" * 4097), "too long at token 9: a token may have 4096 characters"),
    "too few types": (ggml(token_type=[1]), "token_type has 1 entries, but there are"),
    "type out of range": (changed(sentencepiece_metadata(), "token_type", 5, 99), "numbers from 0 to 6"),
    "type of another type": (changed(sentencepiece_metadata(), "token_type", 5, True), "numbers from 0 to 6"),
    "eos outside": (ggml(eos_token_id=10**6), r"eos_token_id is 1000000, and the ids are 0 to \d+"),
    "eos of another type": (ggml(eos_token_id="2"), "eos_token_id must be a number"),
    "flag of another type": (ggml(add_bos_token=1), "add_bos_token must be true or false"),
    "template of another type": ({"tokenizer.chat_template": 3}, "chat_template must be a string"),
    "template not UTF-8": ({"tokenizer.chat_template": b"\xff"}, "chat_template is not UTF-8"),
    "huge template": ({"tokenizer.chat_template": "x" * (1 << 20) + "x"}, "chat_template has 1048577 bytes; at most"),
    "many templates": ({f"tokenizer.chat_template.{i}": "x" for i in range(17)}, "17 chat templates; at most 16"),
}
SENTENCEPIECE: dict[str, tuple[dict[str, Any], str]] = {
    "no scores": (ggml(scores=_ABSENT), "scores is missing, and a tokenizer of the kind llama needs it"),
    "NaN": (changed(sentencepiece_metadata(), "scores", 9, math.nan), "a number that is not finite"),
    "infinity": (changed(sentencepiece_metadata(), "scores", 9, -math.inf), "a number that is not finite"),
    "score of another type": (changed(sentencepiece_metadata(), "scores", 9, "1"), "scores must have numbers"),
    "too few scores": (ggml(scores=[0.0]), "scores has 1 entries"),
}
BYTE_LEVEL: dict[str, tuple[dict[str, Any], str]] = {
    "unknown pre": (ggml(pre="new"), "pre is 'new', which is not supported: use a file with one of a.x-4.0, bloom,"),
    "no pre": (ggml(pre=_ABSENT), "pre does not say how the tokenizer cuts text, and the architecture '' has several"),
    "default": ({**ggml(pre="default"), "general.architecture": "llama"}, "the architecture 'llama' has several ways"),
    "no merges": (ggml(merges=_ABSENT), "merges is missing"),
    "merge without its pieces": (changed(byte_level_metadata(), "merges", 3, "\u0120 \u2581x"), r"merges\[3\] is"),
    "merge of one piece": (changed(byte_level_metadata(), "merges", 3, "the"), "must be two tokens, and both together"),
    "merge of three pieces": (changed(byte_level_metadata(), "merges", 3, "a b c"), r"merges\[3\] is 'a b c'"),
    "merge of another type": (changed(byte_level_metadata(), "merges", 3, ["a", "b"]), r"merges\[3\] must be a string"),
    "bos that is not there": (ggml(bos_token_id=_ABSENT, add_bos_token=True), "there is no tokenizer.ggml.bos_token"),
}


def refusal(metadata: dict[str, Any]) -> str:
    metadata = {name: value for name, value in metadata.items() if value is not _ABSENT}
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the caller checks the words)
        tokenizer_files(metadata)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1200
    return str(caught.value)


@pytest.mark.parametrize("kind", BOTH)
def test_damage_is_one_line(kind: str) -> None:
    change, words = BOTH[kind]
    assert_matches(words, refusal({**sentencepiece_metadata(), **change}))


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_damage_of_scores_is_one_line(kind: str) -> None:
    change, words = SENTENCEPIECE[kind]
    assert_matches(words, refusal({**sentencepiece_metadata(), **change}))


@pytest.mark.parametrize("kind", BYTE_LEVEL)
def test_damage_of_merges_is_one_line(kind: str) -> None:
    change, words = BYTE_LEVEL[kind]
    assert_matches(words, refusal({**byte_level_metadata(), **change}))


def assert_matches(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=words):
        raise ValueError(message)


def test_tokens_that_would_take_hours_to_merge_are_refused() -> None:
    long = [f"{number:04}" + "a" * 4092 for number in range(2000)]
    base = sentencepiece_metadata()
    more = {"tokens": long, "token_type": [1] * 2000, "scores": [-1.0 * i for i in range(2000)]}
    fields = {name: [*base[f"tokenizer.ggml.{name}"], *values] for name, values in more.items()}
    assert "too many long tokens to find their merges" in refusal({**base, **ggml(**fields)})


def test_millions_of_tokens_and_merges_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_vocabulary, "MAX_ENTRIES", 500)
    assert "tokens has 501 entries; at most 500" in refusal(ggml(model="gpt2", tokens=["a"] * 501))
    tokens = [chr(0x4E00 + i) for i in range(400)]
    message = refusal(ggml(model="gpt2", tokens=tokens, merges=["a b"] * 101))
    assert message == "there are 501 tokens and merges; at most 500 are allowed"


@pytest.mark.parametrize("role", ["bos", "eos", "padding", "unknown"])
def test_minus_one_means_that_there_is_no_token(role: str, tmp_path: Path) -> None:
    for number in (-1, (1 << 32) - 1):
        ours = load(tokenizer_files({**byte_level_metadata(), **ggml(**{f"{role}_token_id": number})}), tmp_path)
        assert ours.encode("a")


def test_padding_outside_the_vocabulary_changes_nothing() -> None:
    """Real files have it."""
    metadata = byte_level_metadata()
    assert tokenizer_files({**metadata, **ggml(padding_token_id=10**6)}) == tokenizer_files(metadata)


def outcome(metadata: dict[str, Any], directory: Path) -> str:
    """The error; empty if the tokenizer loads."""
    try:
        stop_ids(read_vocabulary(metadata))
        load(tokenizer_files(metadata), directory)
    except ValueError as error:
        return str(error)
    return ""


def test_random_damage_gives_a_tokenizer_or_one_line(tmp_path: Path) -> None:
    draw = random.Random(4)
    odd: list[Any] = [None, -1, 0, 1, 3, 10**30, True, 1.5, math.nan, "", "a b", b"\xff", [], ["a"] * 3, [[]], {}, " "]
    outcomes = []
    for _ in range(300):
        metadata: dict[str, Any] = dict(draw.choice((byte_level_metadata, sentencepiece_metadata))())
        name = draw.choice(list(metadata))
        values, similar = metadata[name], draw.random() < 0.7
        if isinstance(values, list):
            index = draw.randrange(len(values))
            damage = draw.choice(values) if similar else draw.choice(odd)
            metadata[name] = [*values[:index], damage, *values[index + 1 :]]
        else:
            metadata[name] = draw.randrange(300) if similar and isinstance(values, int) else draw.choice(odd)
        outcomes.append(outcome(metadata, tmp_path))
    assert all(map(str.isprintable, outcomes))
    assert 50 < outcomes.count("") < 250
