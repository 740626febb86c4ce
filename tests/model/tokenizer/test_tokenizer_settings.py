"""Settings next to tokenizer.json: the ids of transformers' AutoTokenizer, or an error that names the setting."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from app.tokenization.tokenizer_trial import try_tokenizer
from model.files import CheckpointError
from model.tokenizer.tokenizer import Tokenizer, TokenizerError, read_names
from model.tokenizer.tokenizer_classes import class_of_model_type
from tests.support.lazy_modules import transformers
from tests.support.model.hub_checkpoints import FAMILIES
from tests.support.model.sample_tokenizers import KINDS, save

TOKEN = {"content": "<|x|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "added_tokens_decoder": {"added_tokens_decoder": {"350": TOKEN | {"special": True}}},
    "stripping": {"added_tokens_decoder": {"350": TOKEN | {"special": True, "lstrip": True, "rstrip": True}}},
    "not special": {"added_tokens_decoder": {"350": TOKEN | {"special": False, "normalized": True}}},
    "additional": {"additional_special_tokens": ["<|x|>", "<|y|>"]},
    "extra": {"extra_special_tokens": ["<|x|>"]},
    "extra by role": {"extra_special_tokens": {"x_token": "<|x|>"}},
    "own role": {"image_token": "<|x|>"},
    "pad": {"pad_token": "<|x|>"},
    "object": {"bos_token": {"__type": "AddedToken", **TOKEN, "content": "<s>", "lstrip": True}},
    "ends": {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True},
    "space": {"add_prefix_space": True},
    "no space": {"add_prefix_space": False},
    "legacy": {"legacy": True},
    "split": {"split_special_tokens": True},
    "without effect": {"clean_up_tokenization_spaces": True, "do_lower_case": True, "sp_model_kwargs": {"a": 1}},
}
CLASSES: list[tuple[str, str | None]] = [
    ("llama", None),
    ("llama", "PreTrainedTokenizerFast"),
    ("llama", "LlamaTokenizerFast"),
    ("llama", "GPT2Tokenizer"),
    ("llama", "NoSuchTokenizer"),
    ("mistral", "LlamaTokenizer"),
    ("gpt2", None),
    ("gpt2", "PreTrainedTokenizerFast"),
    ("gpt_neox", "GPTNeoXTokenizerFast"),
    ("qwen2", "LlamaTokenizerFast"),
    ("qwen3", None),
]
SENTENCEPIECE_CLASSES: list[tuple[str, str | None]] = [("llama", "CodeLlamaTokenizer"), ("llama", "GemmaTokenizer")]
FAMILY_CLASSES: list[tuple[str, str | None]] = [
    ("gemma3_text", None),
    ("gemma2", "PreTrainedTokenizerFast"),
    ("phi3", "LlamaTokenizer"),
    ("phi", "CodeGenTokenizer"),
    ("olmo", None),
    ("olmo2", "GPT2Tokenizer"),
    ("olmoe", None),
    ("qwen3_moe", None),
    ("smollm3", "PreTrainedTokenizerFast"),
    ("granite", "GPT2Tokenizer"),
    ("granitemoe", "GPT2Tokenizer"),
    ("granitemoehybrid", "GPTNeoXTokenizer"),
    ("granitemoeshared", "GPT2Tokenizer"),
    ("ernie4_5", "LlamaTokenizer"),
    ("ernie4_5_moe", "LlamaTokenizer"),
    ("hyperclovax", "GPT2Tokenizer"),
    ("internlm3", "GPT2Tokenizer"),
    ("jais2", None),
    ("ministral", "LlamaTokenizer"),
    ("ministral3", "LlamaTokenizerFast"),
    ("cohere", "CohereTokenizerFast"),
    ("cohere2", None),
    ("falcon", None),
    ("falcon", "GPTNeoXTokenizer"),
    ("opt", None),
    ("starcoder2", "GPT2TokenizerFast"),
    ("starcoder2", None),
    ("nemotron", "GemmaTokenizer"),
    ("stablelm", "TokenizersBackend"),
]
TEXTS = ["the fox", " the  fox", "a <|x|> b<|y|>c", "a<s>the</s> fox <|end|>x", "It's 1234 don't\n\n  Cafe\u0301", "",
         "a \u2581<PRE> a <|endoftext|>"]  # fmt: skip
ROWS = 900


def _write(folder: Path, kind: str, model_type: str, name: str | None, config: dict[str, Any]) -> Path:
    changed = config if name is None else config | {"tokenizer_class": name}
    save(KINDS[kind][0](), folder, **changed)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": ROWS}))
    return folder


def _check(folder: Path) -> None:
    ours, oracle = try_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text) == oracle(text).input_ids, text
    assert len(oracle) <= ROWS
    assert read_names(folder) == oracle.special_tokens_map


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2", "mistral"])
def test_ids_equal_those_of_the_auto_tokenizer(kind: str, setting: str, tmp_path: Path) -> None:
    """16 settings, 4 tokenizers, 11 to 13 pairs of model_type and tokenizer_class."""
    more = SENTENCEPIECE_CLASSES if kind in ("llama2", "mistral") else []
    for model_type, name in [*CLASSES, *more]:
        folder = tmp_path / f"{model_type}-{name}"
        folder.mkdir()
        _check(_write(folder, kind, model_type, name, SETTINGS[setting]))


@pytest.mark.parametrize(("model_type", "name"), FAMILY_CLASSES)
def test_ids_of_a_family_equal_those_of_the_auto_tokenizer(model_type: str, name: str | None, tmp_path: Path) -> None:
    bytewise = "Gemma" not in str(name) and "gemma" not in model_type
    for kind, setting in product(
        ["llama2", "gemma", *(["gpt2", "llama3"] if bytewise else [])], ["none", "ends", "space"]
    ):
        folder = tmp_path / f"{kind}-{setting}"
        folder.mkdir()
        _check(_write(folder, kind, model_type, name, SETTINGS[setting]))


@pytest.mark.parametrize("model_type", sorted({*FAMILIES, *(model_type for model_type, _ in FAMILY_CLASSES)}))
def test_each_family_has_the_tokenizer_class_of_transformers(model_type: str) -> None:
    """A model_type without a class leaves the choice to tokenizer_class."""
    names = transformers.models.auto.tokenization_auto.TOKENIZER_MAPPING_NAMES
    theirs = names.get(model_type)
    assert class_of_model_type(model_type) == (
        "" if theirs in ("TokenizersBackend", "MistralCommonBackend") else theirs
    )


@pytest.mark.parametrize(
    ("kind", "model_type"), list(product(["qwen", "prefixed", "gemma", "unigram", "words"], ["llama", "mistral"]))
)
def test_ids_of_the_generic_class_equal_those_of_the_auto_tokenizer(kind: str, model_type: str, tmp_path: Path) -> None:
    for setting, config in SETTINGS.items():
        folder = tmp_path / setting
        folder.mkdir()
        _check(_write(folder, kind, model_type, "PreTrainedTokenizerFast", config))


@pytest.mark.parametrize("has_decoder", [True, False])
def test_older_files_name_tokens_as_for_the_auto_tokenizer(has_decoder: bool, tmp_path: Path) -> None:
    for kind, (model_type, name) in product(["gpt2", "llama2"], CLASSES):
        folder = tmp_path / f"{kind}-{model_type}-{name}"
        folder.mkdir()
        decoder = {"added_tokens_decoder": {"350": TOKEN | {"content": "<|z|>"}}} if has_decoder else {}
        _write(folder, kind, model_type, name, {"bos_token": "<s>", **decoder})
        names = {"additional_special_tokens": ["<|y|>"], "sep_token": TOKEN | {"content": "<|sep|>"}, "bos_token": "a"}
        (folder / "special_tokens_map.json").write_text(json.dumps({} if has_decoder else names))
        (folder / "added_tokens.json").write_text(json.dumps({"<|x|>": 700, "<|y|>": 701}))
        ours, oracle = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
        for text in [*TEXTS, "a<|sep|>b<|z|>c"]:
            assert ours.encode(text) == oracle(text).input_ids, (text, folder.name)


def test_a_new_token_whose_id_the_model_does_not_have_is_left_out(tmp_path: Path) -> None:
    """Fine-tuning often names a padding token that the embedding has no row for."""
    folder = _write(tmp_path, "llama2", "llama", None, {"pad_token": "[PAD]"})
    size = KINDS["llama2"][0]().get_vocab_size()
    for rows in (size, size + 1):
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": rows}))
        assert Tokenizer.load(folder).vocab_size == rows


def test_a_tokenizer_is_loaded_again_when_a_setting_changes(tmp_path: Path) -> None:
    folder = _write(tmp_path, "gpt2", "gpt2", None, {"add_prefix_space": False})
    first = try_tokenizer(folder)
    assert try_tokenizer(folder) is first
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": True}))
    second = try_tokenizer(folder)
    assert second.encode("fox") != first.encode("fox")
    (folder / "added_tokens.json").write_text(json.dumps({"<|x|>": 500}))
    assert try_tokenizer(folder).id_of("<|x|>") is not None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fix_mistral_regex": True}, "fix_mistral_regex"),
        ({"tokenizer_class": "T5TokenizerFast"}, "T5Tokenizer of tokenizer_config.json is not supported"),
        ({"tokenizer_class": "LlamaTokenizer"}, "needs a BPE vocabulary"),
        ({"tokenizer_class": 5}, "tokenizer_class must be a string"),
        ({"add_prefix_space": "yes"}, "add_prefix_space must be true or false"),
        ({"eos_token": 5}, "eos_token: a token must be a string"),
        ({"eos_token": {"lstrip": True}}, "eos_token: a token must be a string"),
        ({"additional_special_tokens": "<s>"}, "must be lists"),
        ({"additional_special_tokens": [5]}, "a token must be a string"),
        ({"added_tokens_decoder": []}, "must map ids to tokens"),
        ({"added_tokens_decoder": {"-1": TOKEN}}, "no id from 0"),
        ({"added_tokens_decoder": {"9" * 5000: TOKEN}}, "no id from 0"),
        ({"added_tokens_decoder": {"\u0661": TOKEN}}, "no id from 0"),
        ({"added_tokens_decoder": {"4194304": TOKEN}}, "no id from 0"),
        ({"added_tokens_decoder": {"5": "a"}}, "must be an object"),
        ({"added_tokens_decoder": {"5": TOKEN | {"lstrip": 3}}}, "true or false for the rest"),
        ({"pad_token": "a" * 5000}, "at most 4096"),
        ({"pad_token": "\ud800"}, "Unicode"),
    ],
)
def test_a_setting_that_cannot_be_honored_is_named(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(KINDS["unigram"][0](), tmp_path, **config)
    with pytest.raises((TokenizerError, CheckpointError), match=message) as error:
        try_tokenizer(tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1200
