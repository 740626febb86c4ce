"""Special tokens at the start and end of a text: the settings next to tokenizer.json, compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer

from model.tokenizer.tokenizer import Tokenizer, TokenizerError
from tests.support.lazy_modules import transformers
from tests.support.model.sample_tokenizers import characters, gpt2, llama2, save, words

BOS, EOS = {"bos_token": "<s>"}, {"eos_token": "</s>"}
OBJECT = {"content": "<s>", "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
TYPED = {"__type": "AddedToken", **OBJECT}
SETTINGS: list[dict[str, Any]] = [
    {},
    BOS | EOS,
    {"bos_token": TYPED, "eos_token": TYPED | {"content": "</s>"}},
    BOS | EOS | {"add_bos_token": True},
    BOS | EOS | {"add_bos_token": False, "add_eos_token": True},
    EOS | {"add_bos_token": True, "bos_token": None},
]


def no_template() -> RustTokenizer:
    """A llama 2 tokenizer.json that adds no special tokens itself."""
    rust = llama2()
    rust.post_processor = None
    return rust


@pytest.mark.parametrize("config", SETTINGS)
@pytest.mark.parametrize("rust", [llama2(), no_template()], ids=["template", "no template"])
def test_special_tokens_equal_those_of_transformers(
    tmp_path: Path, rust: RustTokenizer, config: dict[str, Any]
) -> None:
    ours = Tokenizer.load(save(rust, tmp_path, **config))
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in ["", "a fox", " </s>a"]:
        assert ours.encode(text) == oracle(text).input_ids
    assert ours.adds_bos == (oracle("").input_ids == [1]) == (rust.post_processor is not None)
    assert ours.eos_id == oracle.eos_token_id
    if oracle.bos_token_id is not None:
        assert ours.bos_id == oracle.bos_token_id


def test_missing_settings_come_from_special_tokens_map(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": OBJECT, "eos_token": "</s>"}))
    ours = Tokenizer.load(save(no_template(), tmp_path))
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert (ours.bos_id, ours.eos_id) == (oracle.bos_token_id, oracle.eos_token_id) == (1, 2)
    other = Tokenizer.load(save(no_template(), tmp_path, eos_token="a"))
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert (other.bos_id, other.eos_id) == (oracle.bos_token_id, oracle.eos_token_id) == (1, 2)


def test_text_that_starts_with_bos_gets_no_second_one(tmp_path: Path) -> None:
    """transformers would add a second one; our API promises one."""
    ours = Tokenizer.load(save(llama2(), tmp_path, **BOS))
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert oracle("<s>a fox").input_ids == [1, *ours.encode("<s>a fox")]
    assert ours.encode("<s>a fox")[:2] != [1, 1]
    assert ours.encode("<s>") == [1]
    assert ours.encode("<s><s>") == [1, 1]
    quiet = Tokenizer.load(save(no_template(), tmp_path, **BOS))
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert quiet.encode("<s><s>a") == oracle("<s><s>a").input_ids
    assert quiet.encode("<s><s>a")[:2] == [1, 1]


def test_token_named_only_in_the_settings_is_special(tmp_path: Path) -> None:
    """In the vocabulary but not in added tokens: found in texts as by transformers, and never shown."""
    raw = json.loads(no_template().to_str()) | {"added_tokens": []}
    ours = Tokenizer.load(save(no_template(), tmp_path, raw, **EOS))
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.encode("a</s>b") == oracle("a</s>b").input_ids
    assert 2 in ours.encode("a</s>b")
    assert ours.bytes_of[2] == b""
    plain = Tokenizer.load(save(no_template(), tmp_path, raw, eos_token=None))
    assert 2 not in plain.encode("a</s>b")
    assert plain.bytes_of[2] == b"</s>"


def test_unnamed_bos_defaults_to_the_eos_token() -> None:
    ours = Tokenizer(words(), "<EOS>")
    assert ours.bos_id == ours.eos_id == ours.encode("<EOS>")[0]
    assert not ours.adds_bos
    config = json.loads(ours.files()["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"]) == ("<EOS>", "<EOS>")
    nameless = Tokenizer(characters())
    assert (nameless.bos_id, nameless.eos_id, nameless.adds_bos) == (None, None, False)
    assert json.loads(nameless.files()["tokenizer_config.json"])["eos_token"] is None


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff", b"[" * 100_000, b'{"a": ' + b"1" * 5000 + b"}"])
def test_broken_settings_are_named_in_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    save(gpt2(), tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / name}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("token", [7, [], {}, {"content": 7}, {"content": ["</s>"]}])
def test_what_is_no_token_is_an_error(tmp_path: Path, token: object) -> None:
    with pytest.raises(TokenizerError, match="eos_token: a token must be a string"):
        Tokenizer.load(save(no_template(), tmp_path, eos_token=token))


def test_null_names_no_token_and_an_unknown_name_a_new_one(tmp_path: Path) -> None:
    for token in (None, ""):
        ours = Tokenizer.load(save(no_template(), tmp_path, eos_token=token, bos_token=token))
        assert (ours.bos_id, ours.eos_id) == (None, None)
    ours = Tokenizer.load(save(no_template(), tmp_path, eos_token="not there"))
    assert ours.eos_id == transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path).eos_token_id
