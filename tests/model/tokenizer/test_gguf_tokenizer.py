"""The tokenizer of a GGUF file equals the original: made of a tokenizer.json as the converter does, and back.

benchmarks and tests have no access to the models' files. WORDS are what the original tokenizer.json of four models make
of HARD (Llama 3.1, Qwen 3, gpt-oss, DeepSeek V3; normalizer and pre-tokenizer of the tokenizers package, 2026-11-30).
"""

from __future__ import annotations

import functools
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from model.checkpoint.chat_template_file import read_chat_template
from model.tokenizer.gguf_pre_tokenizers import BYTE_LEVEL_STEPS
from model.tokenizer.gguf_tokenizer import stop_ids, tokenizer_files
from model.tokenizer.gguf_vocabulary import read_vocabulary
from model.tokenizer.tokenizer import Tokenizer
from tests.support.lazy_modules import transformers
from tests.support.mixed_text import mixed_text, mixed_texts
from tests.support.model.family_tokenizers import FAMILY_TOKENIZERS
from tests.support.model.gguf_metadata import gguf_metadata
from tests.support.model.sample_tokenizers import gpt2, llama2
from tests.support.model.sentencepiece_oracle import sentencepiece_ids

HARD = (
    "I'VE we'll it\u2019s 12345 x\u00b2 \u0663\u0664 HTTPServer2Go  a\r\n\n  "
    "\u4e2d\u6587ab\u304b\ud55c e\u0301!?//\n\t;foo"
)
_END = [" HTTPServer", "2", "Go", " ", " a", "\r\n\n"]
_EAST, _LAST = [" ", " \u4e2d\u6587ab\u304b\ud55c"], ["\t", ";foo"]
WORDS = {
    "llama-bpe": [
        *("I", "'VE", " we", "'ll", " it", "\u2019s", " ", "123", "45", " x", "\u00b2", " ", "\u0663\u0664", *_END),
        *(*_EAST, " e", "\u0301!?//\n", *_LAST),
    ],
    "qwen2": [
        *("I", "'VE", " we", "'ll", " it", "\u2019s", " ", "1", "2", "3", "4", "5", " x", "\u00b2", " ", "\u0663"),
        *("\u0664", *_END, *_EAST, " \u00e9", "!?//\n", *_LAST),
    ],
    "gpt-4o": [
        *("I'VE", " we'll", " it", "\u2019s", " ", "123", "45", " x", "\u00b2", " ", "\u0663\u0664", *_END),
        *(*_EAST, " e\u0301", "!?//\n", *_LAST),
    ],
    "deepseek-v3": [
        *("I", "'VE", " we", "'ll", " it", "\u2019", "s", " ", "123", "45", " x", "\u00b2", " ", "\u0663\u0664", *_END),
        *("  ", "\u4e2d\u6587", "ab", "\u304b", "\ud55c", " e\u0301", "!?//\n", *_LAST),
    ],
}
FAMILIES = {
    "gpt2": "gpt-2",
    "llama3": "llama-bpe",
    "o200k": "gpt-4o",
    "tekken": "tekken",
    "qwen": "qwen2",
    "starcoder": "starcoder",
    "cohere": "command-r",
    "olmo": "olmo",
    "falcon": "falcon",
}
"""Family of FAMILY_TOKENIZERS -> tokenizer.ggml.pre."""


def blocks() -> list[str]:
    """Characters of all blocks of Unicode, runs of one character, line ends, numbers."""
    points = [chr(code) for code in range(0x33480) if not 0xD800 <= code < 0xE000]
    texts = ["".join(points[first : first + 256 : 5]) for first in range(0, len(points), 256)]
    texts += [character * length for character in " \n\t\r-=.a1\u4e2d\U0001f98a" for length in (1, 2, 3, 7, 33)]
    return [*texts, HARD, "\r\n \r\n", "a  b   c", "1 12 123 1234 12345678", "\x00\x7f\u0085", "<|im_end|></s>", ""]


def load(files: dict[str, bytes], directory: Path) -> Tokenizer:
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return Tokenizer.load(directory)


def raw_of(rust: RustTokenizer) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(rust.to_str())
    return content


@functools.cache
def byte_level_metadata() -> dict[str, Any]:
    rust = gpt2()
    rust.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    rust.add_tokens([AddedToken("<think>", normalized=False)])
    ids = {"bos_token_id": rust.token_to_id("<s>"), "eos_token_id": rust.token_to_id("</s>")}
    return gguf_metadata(raw_of(rust), pre="gpt-2", rows=400, **ids)


@functools.cache
def sentencepiece_metadata() -> dict[str, Any]:
    return gguf_metadata(raw_of(llama2()), bos_token_id=1, eos_token_id=2, unknown_token_id=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_byte_level_tokenizer_comes_back_from_its_metadata(name: str, tmp_path: Path) -> None:
    original = FAMILY_TOKENIZERS[name].build()
    original.add_special_tokens([AddedToken("<|im_end|>", normalized=False)])
    bos = original.token_to_id("<|begin|>")
    fields = {} if bos is None else {"bos_token_id": bos}
    metadata = gguf_metadata(raw_of(original), pre=FAMILIES[name], rows=2600, **fields)
    ours = load(tokenizer_files(metadata), tmp_path)
    texts = [*blocks(), *mixed_texts(100_000, 7)]
    assert ours.encode_many(texts) == [e.ids for e in original.encode_batch_fast(texts, add_special_tokens=False)]
    assert ours.encode(HARD) == original.encode(HARD).ids
    assert ours.vocab_size == max(original.get_vocab().values()) + 1
    assert not ours.unproven
    assert {ours.id_of("<|im_end|>")} <= set(stop_ids(read_vocabulary(metadata)))


@pytest.mark.parametrize("pre", WORDS)
def test_words_are_those_of_the_original_file(pre: str) -> None:
    steps = BYTE_LEVEL_STEPS[pre]
    text = unicodedata.normalize("NFC", HARD) if steps.composes else HARD
    cuts = [pre_tokenizers.Split(Regex(step["pattern"]["Regex"]), "isolated") for step in steps.cuts[:-1]]
    found = pre_tokenizers.Sequence(cuts).pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == WORDS[pre]


@pytest.mark.parametrize("pre", BYTE_LEVEL_STEPS)
def test_every_pre_tokenizer_keeps_the_text_and_is_proven(pre: str, tmp_path: Path) -> None:
    ours = load(tokenizer_files({**byte_level_metadata(), "tokenizer.ggml.pre": pre}), tmp_path)
    assert not ours.unproven
    for text in [*blocks(), mixed_text(20_000, 8)]:
        text = text.replace("<|im_end|></s>", "")
        written = normalizers.NFC().normalize_str(text) if BYTE_LEVEL_STEPS[pre].composes else text
        assert ours.decode(ours.encode_many([text])[0]) == written


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("falcon", "a 12345!?x", ["a", "\u0120", "123", "45", "!?", "x"]),
        ("deepseek-llm", "ab\u4e2d 12\n", ["ab", "\u4e2d", "\u0120", "1", "2", "\u010a"]),
        ("deepseek-coder", "ab\u4e2d x!?12", ["ab", "\u4e2d", "\u0120x", "!?", "1", "2"]),
        ("seed-coder", "a!\n 12", ["a", "!", "\u010a", "\u0120", "1", "2"]),
        ("jais-2", "a" + " " * 7 + "b", ["a", "\u0120" * 4, "\u0120" * 2, "\u0120b"]),
        ("command-r", "a 12", ["a", "\u0120", "1", "2"]),
        ("olmo", "a 12's", ["a", "\u012012", "'s"]),
        ("qwen35", "\u0915\u093f1", ["\u0915\u093f", "1"]),
        ("tekken", "aB12", ["a", "B", "1", "2"]),
    ],
)
def test_pre_tokenizers_cut_words_as_their_families_do(pre: str, text: str, words: list[str]) -> None:
    files = tokenizer_files({**byte_level_metadata(), "tokenizer.ggml.pre": pre})
    cut = RustTokenizer.from_str(files["tokenizer.json"].decode()).pre_tokenizer.pre_tokenize_str(text)
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert [word for word, _ in cut] == [
        word if "\u0120" in word or "\u010a" in word else bytewise.pre_tokenize_str(word)[0][0] for word in words
    ]


@pytest.mark.parametrize(("architecture", "pre"), [("gptneox", "olmo"), ("falcon", "falcon"), ("qwen2", "qwen2")])
def test_file_without_the_name_has_the_tokenizer_of_its_architecture(architecture: str, pre: str) -> None:
    named = tokenizer_files({**byte_level_metadata(), "tokenizer.ggml.pre": pre})
    old = {**byte_level_metadata(), "tokenizer.ggml.pre": "default", "general.architecture": architecture}
    assert tokenizer_files(old) == named
    del old["tokenizer.ggml.pre"]
    assert tokenizer_files(old) == named


def test_sentencepiece_ids_are_those_of_its_algorithm(tmp_path: Path) -> None:
    metadata = gguf_metadata(raw_of(FAMILY_TOKENIZERS["llama2"].build()), bos_token_id=1, eos_token_id=2)
    ours = load(tokenizer_files(metadata), tmp_path)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    ids = {text: token for token, text in enumerate(tokens)}
    scores = {tokens[i]: metadata["tokenizer.ggml.scores"][i] for i, kind in enumerate(types) if kind == 1}
    texts = [text for text in [*blocks(), *mixed_texts(20_000, 9, longest=300)] if "</s>" not in text]
    assert ours.encode_many(texts) == [sentencepiece_ids(text, scores, ids) for text in texts]
    assert ours.encode("a")[0] == 1
    assert ours.decode(ours.encode(HARD)) == " " + HARD


def test_merges_of_the_file_come_before_scores(tmp_path: Path) -> None:
    original = llama2()
    merges = [" ".join(pair) for pair in raw_of(original)["model"]["merges"]]
    metadata = {**sentencepiece_metadata(), "tokenizer.ggml.merges": merges}
    del metadata["tokenizer.ggml.scores"]
    ours = load(tokenizer_files(metadata), tmp_path)
    texts = [*blocks(), *mixed_texts(20_000, 9)]
    assert ours.encode_many(texts) == [e.ids for e in original.encode_batch_fast(texts, add_special_tokens=False)]


def test_equal_scores_leave_the_order_to_the_ids() -> None:
    metadata = sentencepiece_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    by_id = {**metadata, "tokenizer.ggml.scores": [-float(token) for token in range(len(tokens))]}
    assert tokenizer_files({**metadata, "tokenizer.ggml.scores": [-1000.0] * len(tokens)}) == tokenizer_files(by_id)


def test_runs_of_spaces_that_the_user_defined_are_merged_first(tmp_path: Path) -> None:
    """As in Gemma, whose files have them with real spaces and a score of -1000."""
    metadata = {**sentencepiece_metadata(), "tokenizer.ggml.add_space_prefix": False}
    for name, values in (("tokens", ["  ", "    "]), ("token_type", [4, 4]), ("scores", [-1000.0] * 2)):
        metadata[f"tokenizer.ggml.{name}"] = [*metadata[f"tokenizer.ggml.{name}"], *values]
    ours = load(tokenizer_files(metadata), tmp_path)
    assert [ours.piece(token) for token in ours.encode_many(["a    b"])[0]] == ["a", "\u2581" * 4, "b"]
    assert ours.decode(ours.encode("a    b")) == "a    b"


def test_space_is_put_before_every_part_of_a_text_except_with_tokens_for_tools(tmp_path: Path) -> None:
    """Llama 2 and Mistral 7B v0.1 do so with each part between special tokens, Mistral v0.3 with the first alone."""
    llama = load(tokenizer_files(sentencepiece_metadata()), tmp_path)
    assert [llama.piece(token) for token in llama.encode("a</s>a")] == ["<s>", "\u2581a", "</s>", "\u2581a"]
    metadata = sentencepiece_metadata()
    for name, value in (("tokens", "[INST]"), ("token_type", 3), ("scores", 0.0)):
        metadata = {**metadata, f"tokenizer.ggml.{name}": [*metadata[f"tokenizer.ggml.{name}"], value]}
    mistral = load(tokenizer_files(metadata), tmp_path)
    pieces = [mistral.piece(token) for token in mistral.encode("a[INST]a[INST] a")]
    assert pieces == ["<s>", "\u2581a", "[INST]", "a", "[INST]", "\u2581a"]


def test_extra_spaces_are_removed_where_the_file_says_so(tmp_path: Path) -> None:
    metadata = {**sentencepiece_metadata(), "tokenizer.ggml.remove_extra_whitespaces": True}
    ours = load(tokenizer_files(metadata), tmp_path)
    assert ours.encode("  a   b ") == ours.encode("a b")


def test_phi3_strips_spaces_after_its_tokens(tmp_path: Path) -> None:
    metadata = {**sentencepiece_metadata(), "general.architecture": "phi3"}
    ours = load(tokenizer_files(metadata), tmp_path)
    assert ours.encode_many(["a</s> \n b"]) == ours.encode_many(["a</s>b"])
    assert ours.encode_many(["a<s> b"]) != ours.encode_many(["a<s>b"])


def test_unigram_is_read_with_its_map_of_characters(tmp_path: Path) -> None:
    pieces = ["<pad>", "</s>", "<unk>", "\u2581", "a", "b", "\u2581a", "ab"]
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3, 3, 2, 1, 1, 1, 1, 1],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -2.0, -3.0, -3.0, -4.0, -3.5],
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
    }
    ours = load(tokenizer_files(metadata), tmp_path)
    assert [ours.piece(token) for token in ours.encode("ab  a")] == ["\u2581", "ab", "\u2581a", "</s>"]
    assert stop_ids(read_vocabulary(metadata)) == (1,)


def test_special_and_added_tokens_have_the_ids_and_kinds_of_the_file(tmp_path: Path) -> None:
    ours = load(tokenizer_files(byte_level_metadata()), tmp_path)
    tokens = byte_level_metadata()["tokenizer.ggml.tokens"]
    assert [ours.piece(token) for token in range(ours.vocab_size)] == tokens[: ours.vocab_size]
    assert {"<s>", "</s>", "<|im_end|>", "<|end|>"} == set(ours.special_ids)
    assert ours.decode(ours.encode_many(["<think>a</s>"])[0]) == "<think>a"
    assert len(ours.encode_many(["<think>"])[0]) == 1
    assert tokens[-1] == "[PAD399]"
    assert ours.id_of("[PAD399]") is None, "a row that no text has"


def test_added_tokens_after_a_gap_keep_their_ids(tmp_path: Path) -> None:
    metadata = dict(byte_level_metadata())
    tokens, types = list(metadata["tokenizer.ggml.tokens"]), list(metadata["tokenizer.ggml.token_type"])
    tokens[390], types[390] = "<|late|>", 3
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    ours = load(tokenizer_files(metadata), tmp_path)
    assert ours.encode_many(["a<|late|>"])[0][-1] == 390
    assert ours.special_ids["<|late|>"] == 390


@pytest.mark.parametrize(
    ("flags", "first", "last"), [({}, 0, 0), ({"bos": True}, 1, 0), ({"eos": True}, 0, 1), ({"bos": 1, "eos": 1}, 1, 1)]
)
def test_bos_and_eos_are_added_as_the_file_says(flags: dict[str, Any], first: int, last: int, tmp_path: Path) -> None:
    fields = {f"tokenizer.ggml.add_{role}_token": bool(value) for role, value in flags.items()}
    ours = load(tokenizer_files({**byte_level_metadata(), **fields}), tmp_path)
    plain, ids = ours.encode_many(["fox"])[0], ours.encode("fox")
    assert ids == [ours.special_ids["<s>"]] * first + plain + [ours.special_ids["</s>"]] * last
    assert (ours.piece(ours.bos_id or 0), ours.piece(ours.eos_id or 0)) == ("<s>", "</s>")


def test_sentencepiece_and_llama3_add_bos_where_the_file_does_not_say_it(tmp_path: Path) -> None:
    assert load(tokenizer_files(sentencepiece_metadata()), tmp_path).adds_bos
    assert load(tokenizer_files({**byte_level_metadata(), "tokenizer.ggml.pre": "llama-bpe"}), tmp_path).adds_bos
    unnamed = {key: value for key, value in sentencepiece_metadata().items() if not key.endswith("token_id")}
    assert tokenizer_files(unnamed) == tokenizer_files(sentencepiece_metadata())


def test_texts_end_at_eos_and_at_names_that_end_turns() -> None:
    metadata = byte_level_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    eos, turn, old = (tokens.index(name) for name in ("</s>", "<|im_end|>", "<|end|>"))
    assert stop_ids(read_vocabulary(metadata)) == (eos, old, turn)
    assert stop_ids(read_vocabulary({**metadata, "tokenizer.ggml.eot_token_id": 5}))[:2] == (eos, 5)
    html = [
        4 if text == "</s>" else kind for text, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
    ]
    tag = {**metadata, "tokenizer.ggml.token_type": html, "tokenizer.ggml.eos_token_id": turn}
    assert stop_ids(read_vocabulary(tag)) == (turn, old), "</s> is a tag of HTML here"


def test_end_of_a_message_ends_no_text_of_gpt_oss() -> None:
    metadata = dict(byte_level_metadata())
    tokens, types = list(metadata["tokenizer.ggml.tokens"]), list(metadata["tokenizer.ggml.token_type"])
    for token, name in ((397, "<|return|>"), (398, "<|call|>")):
        tokens[token], types[token] = name, 3
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    metadata["tokenizer.ggml.eos_token_id"] = 397
    assert tokens[0] == "<|end|>"
    assert stop_ids(read_vocabulary(metadata)) == (397, tokens.index("</s>"), tokens.index("<|im_end|>"), 398)


def test_chat_templates_are_found_where_their_reader_looks(tmp_path: Path) -> None:
    plain = {**byte_level_metadata(), "tokenizer.chat_template": "{{ bos_token }}\u00e9"}
    (one := tmp_path / "one").mkdir()
    load(tokenizer_files(plain), one)
    template = read_chat_template(one)
    assert template is not None
    assert (template.source, template.tools_source) == ("{{ bos_token }}\u00e9", None)
    assert template.names == {"bos_token": "<s>", "eos_token": "</s>"}
    (two := tmp_path / "two").mkdir()
    load(
        tokenizer_files({**plain, "tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "t"}),
        two,
    )
    template = read_chat_template(two)
    assert template is not None
    assert (template.source, template.tools_source) == ("{{ bos_token }}\u00e9", "t")
    (none := tmp_path / "none").mkdir()
    load(tokenizer_files(byte_level_metadata()), none)
    assert read_chat_template(none) is None


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-4o", "tekken"])
def test_ids_equal_those_of_transformers_conversion(pre: str, tmp_path: Path) -> None:
    """A second opinion; it does not compose characters for Qwen, and leaves the merges to the library."""
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    assert transformers is not None
    metadata = {**byte_level_metadata(), "tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False}
    theirs, _ = mapping.convert_gguf_tokenizer(
        "llama",
        {
            "tokenizer_type": "gpt2",
            "pre_tokenizer_type": pre,
            "tokens": metadata["tokenizer.ggml.tokens"],
            "token_type": metadata["tokenizer.ggml.token_type"],
            "merges": metadata["tokenizer.ggml.merges"],
        },
    )
    ours = load(tokenizer_files(metadata), tmp_path)
    texts = [text for text in [*blocks(), *mixed_texts(50_000, 3)] if unicodedata.is_normalized("NFC", text)]
    assert len(texts) > 100
    assert ours.encode_many(texts) == [e.ids for e in theirs.encode_batch_fast(texts, add_special_tokens=False)]
