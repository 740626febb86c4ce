"""Fine-tuning: each family keeps its format, and other libraries read the result the same way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.cli.check import main as check
from model.checkpoint.checkpoint import load
from model.checkpoint.gguf_directory import opened_weights
from model.checkpoint.manifest import manifest_file
from model.files import write_files
from model.nn.reference import generate, logits
from model.tokenizer.tokenizer import Tokenizer
from model.train.__main__ import main
from model.train.data.token_cache import separator
from tests.support.lazy_modules import transformers
from tests.support.model import sample_tokenizers
from tests.support.model.hub_checkpoints import family_name, reference_logits, reference_model, save_reference
from tests.support.model.quantized_checkpoints import LAYOUTS, quantize_checkpoint
from tests.support.model.tiny_gguf import TEMPLATE, tiny_gguf
from tests.support.model.tiny_models import TEXT, tiny_weights
from tests.support.model.training_runs import is_identical, signal_after

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
QUICK = ["--device", "cpu", "--dtype", "float32", "--windows", "4", "--context", "32"]
ROWS = 352
"""More than the tokenizers have, as models are padded."""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text to train on."""
    path = tmp_path / "text.txt"
    path.write_text("\n\n\n".join(f"Tale {i}.\n{TEXT}" for i in range(4)))
    return path


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A weights directory in our own layout."""
    return tiny_weights(tmp_path / "ours")


def _theirs(case: str, directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Writes the files of a hub directory, including shards."""
    model = reference_model(case, vocab_size=ROWS)
    model.to(dtype).save_pretrained(directory, max_shard_size="50KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    sample_tokenizers.save(
        sample_tokenizers.llama3(), directory, tokenizer_class="PreTrainedTokenizerFast", bos_token="<|begin|>"
    )
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "LICENSE").write_text("Do as you like.")
    return model


@pytest.fixture(autouse=True)
def _no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables samples, which take longer than the training here."""
    monkeypatch.setattr("model.train.sampling.sample_text", lambda *_, **__: "")


def _train(init: Path, text: Path, out: Path, *flags: str) -> int:
    return main(["--init", str(init), "--data", str(text), "--out", str(out), *QUICK, *flags])


def _loss(model: Any, tokens: list[int]) -> float:
    """Nats per token, computed by transformers."""
    return float(torch.nn.functional.cross_entropy(reference_logits(model, tokens)[:-1], torch.tensor(tokens[1:])))


@pytest.mark.parametrize(
    "case",
    [
        *("gpt2-b", "llama-b", "mistral-a", "qwen2-b", "qwen3-a", "gpt_neox-c"),
        *("granitemoehybrid-b", "cohere2-c", "glm4-a", "falcon-c", "apertus-a"),
        *("qwen3_moe-b", "granitemoe-a", "ernie4_5_moe-a", "gpt_oss-a"),
    ],
)
def test_fine_tuned_model_of_each_family_is_read_by_transformers(
    tmp_path: Path, text: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, out = _theirs(case, tmp_path / "theirs"), tmp_path / "out"
    assert _train(tmp_path / "theirs", text, out, "--steps", "12", "--lr", "0.01") == 0, capsys.readouterr().err
    kept = [path for path in (tmp_path / "theirs").iterdir() if not path.name.startswith("model")]
    assert len(kept) >= 6
    for path in kept:
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    after, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    assert after.config.model_type == family_name(case)
    tokens = transformers.AutoTokenizer.from_pretrained(out)(TEXT)["input_ids"][:99]
    assert _loss(after.eval(), tokens) < 0.8 * _loss(before, tokens)
    decoder = load(out, device=CPU, dtype=torch.float32).decoder
    assert (logits(decoder, tokens) - reference_logits(after, tokens)).abs().max() < 1e-4
    written = after.generate(torch.tensor([tokens[:9]]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    assert generate(decoder, tokens[:9], 16) == written[0, 9:].tolist()
    assert check([str(out)]) == 0
    printed = capsys.readouterr().out
    assert "golden       passed" in printed and "manifest     passed" in printed


@pytest.mark.parametrize("layout", ["awq", "gptq of 8 bits", "pack-quantized with zero points"])
def test_packed_weights_are_trained_as_numbers_and_exported_without_their_quantization(
    tmp_path: Path, text: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of rate 1e-30 changes nothing: the export has the numbers that the packed matrices stand for."""
    base, out = tmp_path / "base", tmp_path / "out"
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
    save_reference("llama-b", base, vocab_size=ROWS, **sizes)
    sample_tokenizers.save(sample_tokenizers.llama3(), base, tokenizer_class="PreTrainedTokenizerFast")
    quantize_checkpoint(base, *LAYOUTS[layout])
    flags = ("--steps", "1", "--lr", "1e-30", "--weight-decay", "0", "--export-dtype", "float32")
    assert _train(base, text, out, *flags) == 0, capsys.readouterr().err
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    before, after = (load(each, device=CPU, dtype=torch.float32) for each in (base, out))
    assert before.weights.packed and not after.weights.packed
    for (name, expected), found in zip(
        before.decoder.state_dict().items(), after.decoder.state_dict().values(), strict=True
    ):
        assert torch.allclose(found, expected, rtol=0, atol=1e-20), name
    transformers.AutoModelForCausalLM.from_pretrained(out)
    assert check([str(out)]) == 0


@pytest.mark.parametrize("dtype", ["float32", None])
def test_a_gguf_file_is_trained_as_numbers_and_exported_as_its_family(
    tmp_path: Path, text: Path, dtype: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of rate 1e-30 changes nothing: the export has the numbers that the packed matrices stand for."""
    path, out = tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "out"
    flags = ("--steps", "1", "--lr", "1e-30", "--weight-decay", "0")
    flags += ("--export-dtype", dtype) if dtype else ()
    assert _train(path, text, out, *flags) == 0, capsys.readouterr().err
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("llama", dtype or "bfloat16")
    assert (out / "chat_template.jinja").read_text() == TEMPLATE
    with opened_weights(path) as directory:
        before = load(directory, device=CPU, dtype=torch.float32)
    after = load(out, device=CPU, dtype=torch.float32)
    assert before.weights.packed and not after.weights.packed
    rounded = getattr(torch, dtype or "bfloat16")
    for (name, expected), found in zip(
        before.decoder.state_dict().items(), after.decoder.state_dict().values(), strict=True
    ):
        assert torch.allclose(found, expected.to(rounded).float(), rtol=0, atol=1e-20), name
    transformers.AutoModelForCausalLM.from_pretrained(out)
    assert check([str(out)]) == 0


def test_a_run_from_a_gguf_file_learns_and_resumes_without_it(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf")
    flags = ["--steps", "12", "--lr", "0.01", "--save-seconds", "1000"]
    assert _train(path, text, tmp_path / "whole", *flags) == 0
    printed = capsys.readouterr().out
    before = next(line for line in printed.splitlines() if line.startswith("step 0: held-out bits per byte"))
    assert _bits(printed) < 0.8 * float(before.split()[6])
    with pytest.MonkeyPatch.context() as patch:
        signal_after(6, patch)
        assert _train(path, text, tmp_path / "halves", *flags) == 143
    path.unlink()
    assert _train(path, text, tmp_path / "halves", *flags, "--resume") == 0
    assert is_identical(*(load_file(tmp_path / name / "model.safetensors") for name in ("whole", "halves")))


@pytest.mark.parametrize("switches", [{"norm_position": "post", "final_norm": False}, {"tied_head": False}])
def test_fine_tuning_continues_from_our_own_weights(
    tmp_path: Path, text: Path, switches: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """For shapes of a family and shapes of our own layout."""
    base = tiny_weights(tmp_path / "base", **switches)
    assert _train(base, text, tmp_path / "first", "--steps", "40", "--lr", "0.01") == 0
    first = _bits(capsys.readouterr().out)
    assert _train(tmp_path / "first", text, tmp_path / "second", "--steps", "1", "--lr", "0.0001") == 0
    printed = capsys.readouterr().out
    before = next(line for line in printed.splitlines() if line.startswith("step 0: held-out bits per byte"))
    assert abs(float(before.split()[6]) - first) < 0.001
    assert abs(_bits(printed) - first) < 0.1
    assert "fine-tuned from `first` by" in (tmp_path / "second/README.md").read_text()
    configs = [(tmp_path / name / "config.json").read_bytes() for name in ("base", "first", "second")]
    assert len(set(configs)) == 1
    assert check([str(tmp_path / "second")]) == 0


def test_run_resumes_bit_for_bit_without_its_base_directory(
    tmp_path: Path, text: Path, ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--steps", "6", "--save-seconds", "1000"]
    assert _train(ours, text, tmp_path / "whole", *flags) == 0
    with pytest.MonkeyPatch.context() as patch:
        signal_after(3, patch)
        assert _train(ours, text, tmp_path / "halves", *flags) == 143
    shutil.rmtree(ours)
    capsys.readouterr()
    assert main(["--data", str(text), "--out", str(tmp_path / "halves"), *flags, "--resume"]) == 2
    assert "started with --init: pass it again" in capsys.readouterr().err
    assert _train(tmp_path / "another", text, tmp_path / "halves", *flags, "--resume") == 2
    assert f"had --init {ours}" in capsys.readouterr().err
    shape = ["--preset", "nano", "--vocab-size", "300", "--layers", "1"]
    assert main(["--data", str(text), "--out", str(tmp_path / "new"), *shape, *QUICK, "--steps", "1"]) == 0
    assert _train(ours, text, tmp_path / "new", "--steps", "2", "--resume") == 2
    assert "started without --init: omit it" in capsys.readouterr().err
    assert _train(ours, text, tmp_path / "halves", *flags, "--resume") == 0
    assert is_identical(*(load_file(tmp_path / name / "model.safetensors") for name in ("whole", "halves")))


def test_weights_are_written_in_their_own_or_a_requested_format(tmp_path: Path, text: Path) -> None:
    """Float32 stays float32 in the tests of each family above."""
    _theirs("llama-b", tmp_path / "theirs", torch.bfloat16)
    for name, flags, dtype in (("same", [], "bfloat16"), ("half", ["--export-dtype", "float16"], "float16")):
        assert _train(tmp_path / "theirs", text, tmp_path / name, "--steps", "1", *flags) == 0
        written = {str(tensor.dtype) for tensor in load_file(tmp_path / name / "model.safetensors").values()}
        assert written == {f"torch.{dtype}"}
    before, same, half = (json.loads((tmp_path / n / "config.json").read_text()) for n in ("theirs", "same", "half"))
    assert same == before
    assert half == {**before, "dtype": "float16"}
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.float16


def test_values_beyond_the_export_format_are_not_written(
    tmp_path: Path, text: Path, ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(ours / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, ours / "model.safetensors")
    out = tmp_path / "out"
    assert _train(ours, text, out, "--steps", "1", "--export-dtype", "float16") == 2
    assert "norm.weight has numbers too large for float16" in capsys.readouterr().err
    assert not (out / "model.safetensors").exists()
    assert _train(ours, text, out, "--steps", "1", "--export-dtype", "bfloat16", "--resume") == 0


def test_documents_are_separated_by_the_models_eos_and_start_like_its_prompts(tmp_path: Path) -> None:
    theirs, out, text = tmp_path / "theirs", tmp_path / "out", tmp_path / "four.txt"
    text.write_text("\n\n\n".join(f"{number}. {TEXT}" for number in range(4)))
    _theirs("llama-b", theirs)
    (theirs / "generation_config.json").write_text('{"eos_token_id": [7, 0]}')
    assert _train(theirs, text, out, "--steps", "1") == 0
    (tokens,) = out.glob(".training/*/train.bin")
    ids = np.fromfile(tokens, dtype="uint16").tolist()
    begin = sample_tokenizers.llama3().token_to_id("<|begin|>")
    assert ids[:2] == [7, begin] and ids.count(begin) == 4
    assert separator(Tokenizer.train([TEXT], 300)) == [0]


def test_lines_end_with_the_models_eos(tmp_path: Path, ours: Path) -> None:
    (tmp_path / "lines.txt").write_text("the fox sang\nwho are you\n" * 30)
    before = (ours / "tokenizer.json").read_bytes()
    assert _train(ours, tmp_path / "lines.txt", tmp_path / "out", "--steps", "30", "--per-line", "--lr", "0.01") == 0
    assert (tmp_path / "out/tokenizer.json").read_bytes() == before
    decoder, tokenizer = load(tmp_path / "out", device=CPU, dtype=torch.float32).decoder, Tokenizer.load(ours)
    line = generate(decoder, tokenizer.encode("<|endoftext|>the fox"), 12, eos_ids=(0,))
    assert line[-1] == 0 and tokenizer.decode(line) == " sang"


def _change(base: Path, name: str = "config.json", **changes: object) -> None:
    raw = json.loads((base / name).read_text()) if (base / name).exists() else {}
    (base / name).write_text(json.dumps(raw | changes))


def _changed_weights(base: Path) -> None:
    write_files(base, {"manifest.json": manifest_file({"model.safetensors": b"another"})})


@pytest.mark.parametrize(
    ("break_it", "flags", "words"),
    [
        (None, "--context 257", "from 2 to the 256 positions that the model in"),
        (None, "--context 1", "from 2 to the 256 positions"),
        (None, "--pairs x.tsv", "has no encoder"),
        (None, "--init nowhere", "nowhere: no such directory"),
        (lambda base: (base / "tokenizer.json").unlink(), "", "tokenizer.json: no such file"),
        (lambda base: shutil.copy(base / "config.json", base / "tokenizer.json"), "", "not a tokenizer"),
        (lambda base: shutil.move(base / "model.safetensors", base / "ckpt.bin"), "", "ckpt.bin is not read"),
        (lambda base: _change(base, quantization_config={"quant_method": "hqq"}), "", "quantized weights"),
        (lambda base: _change(base, "generation_config.json", eos_token_id=5000), "", "eos_token_id 5000"),
        (_changed_weights, "", "differs from manifest.json"),
    ],
)  # fmt: skip
def test_invalid_model_or_flags_are_one_line(
    tmp_path: Path, text: Path, ours: Path, break_it: Any, flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if break_it:
        break_it(ours)
    assert _train(ours, text, tmp_path / "out", "--steps", "1", *flags.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error


def _bits(printed: str) -> float:
    line = next(line for line in printed.splitlines() if line.startswith("held-out bits per byte"))
    return float(line.split()[4])
