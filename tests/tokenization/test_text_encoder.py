"""Tokenizers with unusual regular expressions: detected, tried before they are served, and run in a sandbox."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

from app.common.errors import EngineFailed, InvalidRequest
from app.tokenization.text_encoder import TextEncoder
from app.tokenization.tokenizer_sandbox import Encode, Part, TokenizerSandbox, slices_of
from app.tokenization.tokenizer_trial import try_in_sandbox
from model.tokenizer.regexes import find_unproven
from model.tokenizer.token_spans import run_to_completion
from model.tokenizer.tokenizer import Tokenizer, TokenizerError
from tests.support.model.sample_tokenizers import KINDS, gpt2, save
from tests.support.model.tiny_models import TEXT
from tests.support.regex_attacks import attacks

pytestmark = pytest.mark.slow

QUADRATIC = r"\s+$"
BEYOND_THE_LIMIT = r"(?:\w+\s?)+!"
CATASTROPHIC = (
    r"([a-z]+)*\d",
    r"(?:a|aa)+$",
    r"(?:\p{L}+\p{M}*)+(?!\p{L}|\s)",
    r"x(?:yz|yzyz)+[^q]w",
    r"(?:[a-c]+[b-d]+)+E",
    r"(.*?,){12}P",
    r"^(([a-z])+.)+[A-Z]([a-z])+$",
    r"(?i:it|is|\s*)*\u2019",
)


def with_pattern(directory: Path, pattern: str) -> Path:
    """A byte-level BPE that splits texts by `pattern`."""
    directory.mkdir(exist_ok=True)
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    rust = gpt2()
    rust.pre_tokenizer = pre_tokenizers.Sequence([split, bytewise])
    return save(rust, directory)


@pytest.mark.parametrize("kind", KINDS)
def test_common_tokenizers_need_no_sandbox(kind: str, tmp_path: Path) -> None:
    assert not Tokenizer.load(save(KINDS[kind][0](), tmp_path)).unproven


@pytest.mark.parametrize("pattern", CATASTROPHIC)
def test_catastrophic_pattern_holds_no_text_longer_than_its_limit(pattern: str, tmp_path: Path) -> None:
    """The slowest of the known attacks is an error or done within the limit, and the next text is encoded."""
    directory = with_pattern(tmp_path, pattern)
    assert try_in_sandbox(directory).patterns == (pattern,)
    tokenizer = Tokenizer.load(directory)

    def use(box: TokenizerSandbox) -> None:
        refused = 0
        for attack in random.Random(pattern).sample(attacks(pattern), 20):
            began = time.monotonic()
            try:
                TextEncoder(tokenizer, box).encode(attack.text(4096))
            except InvalidRequest:
                refused += 1
                if refused == 2:
                    break
            assert time.monotonic() - began < 20
        assert TextEncoder(tokenizer, box).encode("abc") == tokenizer.encode("abc")

    with_sandbox(directory, use)


def test_pattern_that_fails_on_a_short_text_is_refused_in_one_line(tmp_path: Path) -> None:
    rust = gpt2()
    endless = normalizers.Replace(Regex(r"(?:\w|\w|,| )+\p{Sc}"), "!")
    rust.normalizer = normalizers.Sequence([normalizers.NFC(), endless])
    began = time.monotonic()
    refusal = r"tokenizer\.json: the tokenizer (gives up|takes more than .*) on a short text"
    with pytest.raises(TokenizerError, match=refusal):
        try_in_sandbox(save(rust, tmp_path))
    assert time.monotonic() - began < 60


def test_unusual_but_fast_pattern_runs_in_the_sandbox(tmp_path: Path) -> None:
    directory = with_pattern(tmp_path, QUADRATIC)
    assert try_in_sandbox(directory).patterns == (QUADRATIC,)
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.unproven.patterns == (QUADRATIC,)
    with_sandbox(directory, lambda box: _assert_same_tokens(tokenizer, TextEncoder(tokenizer, box)))


def with_sandbox(directory: Path, use: Callable[[TokenizerSandbox], None]) -> None:
    box = TokenizerSandbox(directory)
    try:
        use(box)
    finally:
        box.close()
    assert not box.pids
    with pytest.raises(EngineFailed):
        box.ask(Encode(text="a", part="plain"), seconds=1)


def _assert_same_tokens(tokenizer: Tokenizer, encoder: TextEncoder) -> None:
    for text in ("", "a", TEXT, "\U0001f98a\x00", TEXT * 40):
        assert encoder.encode(text) == tokenizer.encode(text)
        assert encoder.encode_plain(text) == tokenizer.encode_many([text])[0]
        for part in get_args(Part):
            expected = run_to_completion(slices_of(tokenizer, text, part))
            assert list(run_to_completion(encoder.span_slices(text, part))) == list(expected)


def test_text_that_takes_too_long_is_an_error_and_the_next_is_encoded(tmp_path: Path) -> None:
    directory = with_pattern(tmp_path, r"(?:\w\w?){1,4}\w*\w*;")
    tokenizer = Tokenizer.load(directory)

    def use(box: TokenizerSandbox) -> None:
        encoder = TextEncoder(tokenizer, box)
        assert encoder.encode("abc") == tokenizer.encode("abc")
        (pid,) = box.pids
        began = time.monotonic()
        with pytest.raises(InvalidRequest, match=r"tokenizer takes more than [12](\.\d)? seconds for this text"):
            encoder.encode("a" * 4000 + "!;")
        assert time.monotonic() - began < 20
        with pytest.raises(
            InvalidRequest, match=r"takes more than 0\.1 seconds"
        ):  # the remaining budget of the same request
            encoder.encode("a" * 4000 + "!;")
        assert TextEncoder(tokenizer, box).encode("abc") == tokenizer.encode("abc")
        assert pid not in box.pids

    with_sandbox(directory, use)


def test_text_beyond_the_retry_limit_of_a_pattern_is_invalid(tmp_path: Path) -> None:
    directory = with_pattern(tmp_path, BEYOND_THE_LIMIT)
    tokenizer = Tokenizer.load(directory)

    def use(box: TokenizerSandbox) -> None:
        with pytest.raises(InvalidRequest, match="the model's tokenizer gives up for this text"):
            TextEncoder(tokenizer, box).encode("a" * 60 + ";!")

    with_sandbox(directory, use)


def test_tokenizer_panic_in_this_process_is_an_engine_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.load(with_pattern(tmp_path, BEYOND_THE_LIMIT))
    with caplog.at_level(logging.ERROR), pytest.raises(EngineFailed, match="the model's tokenizer failed on this text"):
        TextEncoder(tokenizer).encode("a" * 60 + ";!")
    (record,) = caplog.records
    assert "retry-limit" in record.getMessage() and "/" not in record.getMessage().partition("text: ")[2]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"pre_tokenizer": {"type": "Novel"}}, "unknown type"),
        ({"pre_tokenizer": {"type": [[]]}}, "unknown type"),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"String": "a" * 65}}}, "more than 64"),
        ({"pre_tokenizer": {"type": "Split", "pattern": "a"}}, "unknown type"),
        ({"normalizer": ["NFC"]}, "unknown type"),
        ({"model": {"type": "WordPiece", "max_input_chars_per_word": 10**6}}, "words of more than 256"),
        ({"model": {"vocab": [["a" * 65, -1.0]]}}, "pieces of more than 64"),
        ({"added_tokens": [{"content": " \u3000", "rstrip": True}]}, "strips the white space"),
        ({"added_tokens": [{"content": "x", "lstrip": True, "normalized": True}]}, "strips the white space"),
    ],
)
def test_other_unproven_parts_are_named(content: dict[str, Any], words: str) -> None:
    assert words in find_unproven(content).others[0]


def test_common_vocabularies_and_added_tokens_are_proven() -> None:
    mask = {"content": "<mask>", "lstrip": True, "normalized": False}
    assert not find_unproven({"model": {"vocab": [["a" * 64, -1.0]]}, "added_tokens": [mask, {"content": " "}]})


def test_broken_pattern_is_refused(tmp_path: Path) -> None:
    raw = {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a"}, "behavior": "Isolated", "invert": False}}
    with pytest.raises(TokenizerError, match="fails"):
        try_in_sandbox(save(gpt2(), tmp_path, raw))
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace('"(a"', "9" * 5000))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a tokenizer"):
        try_in_sandbox(tmp_path)
