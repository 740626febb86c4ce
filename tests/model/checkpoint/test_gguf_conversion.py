"""A converted GGUF file is the directory that it was made from: names, layout, numbers, and what others read of it."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from app.__main__ import main
from model.checkpoint.checkpoint import load
from model.checkpoint.gguf_directory import opened_weights
from model.checkpoint.stored_weights import find_weights
from model.families.registry import read_config
from model.tokenizer.tokenizer import Tokenizer
from tests.support.lazy_modules import transformers
from tests.support.model.convertible import LLAMA_SIZES, config_of, convert, names
from tests.support.model.gguf_conversion import write_converted
from tests.support.model.gguf_originals import save_original
from tests.support.model.hub_checkpoints import family_name, reference_logits
from tests.support.model.quantized_checkpoints import FILE
from tests.support.model.tiny_gguf import TEMPLATE, fuse_qkv, tiny_gguf, tiny_series, tiny_tokenizer
from tests.support.model.tiny_models import VOCAB

CASES = [
    *("llama-b", "qwen2-b", "gpt2-b", "gemma3_text-a", "phi3-a", "falcon-c", "gpt_neox-a", "cohere2-a"),
    *("exaone4-b", "qwen3_moe-b", "granitemoe-a", "gpt_oss-a", "ernie4_5_moe-a", "ministral3-b", "apertus-b"),
]
"""Reordered rows, tied heads, transposed and fused matrices, norms of 1 + weight, single and stacked experts."""
CPU = torch.device("cpu")
PROMPT = [1, 5, 9, 33, 2, 7]


def _save(case: str, folder: Path, weights: Path, kind: str = "F32", **changes: Any) -> tuple[Path, Any]:
    """The GGUF file of a model in folder/original, and the model of transformers. weights: has its tokenizer."""
    model = save_original(case, folder / "original", vocab_size=VOCAB, **changes)
    tokenizer = tiny_tokenizer(weights)
    return write_converted(folder / "original", folder / "x.gguf", kind, tokenizer=tokenizer), model


def _state(directory: Path) -> dict[str, Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _is_close(one: dict[str, Tensor], other: dict[str, Tensor], atol: float = 1e-6) -> bool:
    """Gemma's norms come back with an error of float32."""
    return one.keys() == other.keys() and all(
        torch.allclose(one[name], other[name], rtol=0, atol=atol) for name in other
    )


@pytest.mark.parametrize("case", CASES)
def test_a_converted_file_is_the_original_directory(tmp_path: Path, weights: Path, case: str) -> None:
    path, model = _save(case, tmp_path, weights)
    convert(path, tmp_path / "out", dtype="float32")
    assert _is_close(_state(tmp_path / "out"), _state(tmp_path / "original"))
    assert read_config(config_of(tmp_path / "out"))[0].name == family_name(case)
    assert (tmp_path / "out/chat_template.jinja").read_text() == TEMPLATE
    text = "Who are you? asked the owl, caf\u00e9 in claw."
    assert Tokenizer.load(tmp_path / "out").encode(text) == Tokenizer.load(weights).encode(text)
    assert main(["check", str(tmp_path / "out")]) == 0
    read, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    assert type(read) is type(model) and (read.config.eos_token_id, read.config.pad_token_id) == ([0], None)
    assert (reference_logits(read.eval(), PROMPT) - reference_logits(model, PROMPT)).abs().max() < 1e-5


def test_fused_queries_keys_and_values_are_split(tmp_path: Path, weights: Path) -> None:
    path, _ = _save("phi-a", tmp_path, weights, num_key_value_heads=None)
    convert(fuse_qkv(path, tmp_path / "fused.gguf"), tmp_path / "out", dtype="float32")
    assert _is_close(_state(tmp_path / "out"), _state(tmp_path / "original"), 0)


@pytest.mark.parametrize("case", ["llama-b", "qwen2-b", "granitemoe-a", "qwen3_moe-b"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_quantized_file_becomes_the_bfloat16_model_that_it_stands_for(
    tmp_path: Path, weights: Path, case: str, kind: str
) -> None:
    path, _ = _save(case, tmp_path, weights, kind, hidden_size=64)
    convert(path, tmp_path / "out")
    assert {tensor.dtype for tensor in _state(tmp_path / "out").values()} == {torch.bfloat16}
    with opened_weights(path) as directory:
        expected = load(directory, device=CPU, dtype=torch.bfloat16)
    found = load(tmp_path / "out", device=CPU, dtype=torch.bfloat16).decoder.state_dict()
    assert expected.weights.packed
    for name, tensor in expected.decoder.state_dict().items():
        assert torch.equal(found[name], tensor), name
    assert config_of(tmp_path / "out")["dtype"] == "bfloat16"


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_a_dense_file_keeps_the_number_format_of_its_matrices(tmp_path: Path, kind: str, dtype: str) -> None:
    """Its norms are in F32, whatever the original had."""
    convert(tiny_gguf(tmp_path / "tiny.gguf", kind), tmp_path / "out")
    found, original = _state(tmp_path / "out"), _state(tmp_path / "original of tiny")
    assert config_of(tmp_path / "out")["dtype"] == dtype
    for name, tensor in original.items():
        assert torch.equal(found[name], tensor.to(getattr(torch, dtype))), name


@pytest.mark.parametrize("bits", [4, 8])
def test_a_dense_file_is_packed_as_its_original_is(tmp_path: Path, weights: Path, bits: int) -> None:
    path, _ = _save("llama-b", tmp_path, weights, **LLAMA_SIZES)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(weights / name, tmp_path / "original" / name)
    convert(path, tmp_path / "ours", bits=bits)
    convert(tmp_path / "original", tmp_path / "theirs", bits=bits)
    ours, theirs = _state(tmp_path / "ours"), _state(tmp_path / "theirs")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    quantization = "quantization_config"
    assert config_of(tmp_path / "ours")[quantization] == config_of(tmp_path / "theirs")[quantization]


def test_a_series_and_its_folder_are_converted(tmp_path: Path) -> None:
    (tmp_path / "series").mkdir()
    first, _ = tiny_series(tmp_path / "series")
    convert(tiny_gguf(tmp_path / "alone.gguf"), tmp_path / "expected")
    for given in (first, tmp_path / "series"):
        assert main(["convert", str(given), str(tmp_path / "out")]) == 0
        assert (tmp_path / "out" / FILE).read_bytes() == (tmp_path / "expected" / FILE).read_bytes()
        shutil.rmtree(tmp_path / "out")


def test_quantized_and_broken_files_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:-40])
    before = names(tmp_path)
    for given, flags, words in (
        (path, ["--quantize", "int8"], "is packed already"),
        (path, ["--chars", "meta.pkl"], "--chars is for the checkpoint of a nanoGPT"),
        (cut, [], "is truncated"),
        (tmp_path / "none.gguf", [], "cannot be read"),
    ):
        capsys.readouterr()
        assert main(["convert", str(given), str(tmp_path / "out"), *flags]) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("error: ") and words in printed.err and printed.err.count("\n") == 1
    assert names(tmp_path) == before


def test_a_file_of_the_hub_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is a link to a blob without a suffix."""
    blob = tiny_gguf(tmp_path / "tiny.gguf").rename(tmp_path / "0123abcd")
    (tmp_path / "tiny-Q8_0.gguf").symlink_to(blob)
    monkeypatch.setattr("model.checkpoint.hub_download.fetch", lambda _named, _say: tmp_path / "tiny-Q8_0.gguf")
    assert main(["convert", "org/tiny:Q8_0", str(tmp_path / "out")]) == 0
    assert main(["check", str(tmp_path / "out")]) == 0


def test_the_pickle_of_the_original_wins_in_a_folder_with_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_gguf(tmp_path / "both.gguf")
    folder = shutil.copytree(tmp_path / "original of both", tmp_path / "folder")
    (tmp_path / "both.gguf").rename(folder / "both.gguf")
    torch.save(load_file(folder / FILE), folder / "pytorch_model.bin")
    expected = _state(folder)
    (folder / FILE).unlink()
    assert main(["convert", str(folder), str(tmp_path / "out")]) == 0, capsys.readouterr().err
    found = _state(tmp_path / "out")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_memory_does_not_grow_with_the_model(tmp_path: Path, kind: str) -> None:
    """Matrices of 8192 x 512 numbers, of which 4 MiB are converted at once. Reading the whole model is the control."""
    path = tiny_gguf(tmp_path / "tiny.gguf", kind, width=512, mlp_width=8192)
    tracemalloc.start()
    convert(path, tmp_path / "out", dtype="bfloat16")
    peak = tracemalloc.get_traced_memory()[1]
    with opened_weights(path) as directory:
        weights = find_weights(directory)
    tracemalloc.reset_peak()
    whole = [weights.read(name, "bfloat16") for name in weights.mappings]
    control = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert control > sum(array.nbytes for array in whole) > 45 << 20
    assert peak < 36 << 20
