"""What a run from nothing writes is a Hugging Face directory: transformers reads model and tokenizer as we do."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from model.checkpoint.checkpoint import load
from model.checkpoint.golden import verify
from model.families.registry import family_of
from model.nn.reference import generate, logits
from model.presets import PRESET_NAMES, SIZES, preset
from model.tokenizer.tokenizer import Tokenizer
from model.train.__main__ import main
from tests.support.model.hub_checkpoints import their_logits
from tests.support.model.tiny_models import TEXT
from tests.support.model.training_runs import SMALL

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
OF_A_FAMILY = {"llama": SIZES, "gpt2": ("gpt",)}


def test_these_presets_have_a_family_that_others_know() -> None:
    found = {name: family_of(preset(name)).name for name in PRESET_NAMES}
    assert {name for name, family in found.items() if family != "inkstream"} == {*SIZES, "gpt"}
    assert all(found[name] == family for family, names in OF_A_FAMILY.items() for name in names)
    assert family_of(preset("small", "gpt")).name == "gpt2"
    assert family_of(preset("small", "textbook")).name == "inkstream"


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        (["--preset", "small"], "float32"),
        (["--preset", "gpt"], "float16"),
        (["--preset", "nano", "--arch", "gpt"], "bfloat16"),
    ],
)
def test_transformers_reads_the_result_as_we_do(
    tmp_path: Path, flags: list[str], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model.train.common.sample.sample_text", lambda *_, **__: "")
    (tmp_path / "text.txt").write_text(TEXT * 3)
    size = ["--layers", "2", "--width", "64", "--heads", "4", "--steps", "8", "--export-dtype", dtype]
    assert main(["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"), *SMALL, *flags, *size]) == 0
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    assert not any(report.values()), report
    decoder, read = load(tmp_path / "out", device=CPU, dtype=torch.float32).decoder, theirs.eval()
    ours, other = Tokenizer.load(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    text = TEXT[90:150] + "<|endoftext|>caf\u00e9 \U0001f98a"
    ids = other(text)["input_ids"]
    assert ids == ours.encode(text) and (other.eos_token_id, other.bos_token_id) == (ours.eos_id, ours.bos_id) == (0, 0)
    ids = ids[:32]
    assert (logits(decoder, ids) - their_logits(read, ids)).abs().max() < 1e-4
    written = read.generate(
        torch.tensor([ids[:5]]), max_new_tokens=20, do_sample=False, eos_token_id=None, repetition_penalty=1.0
    )
    assert generate(decoder, ids[:5], 20) == written[0, 5:].tolist()
    assert {str(t.dtype) for t in load_file(tmp_path / "out/model.safetensors").values()} == {f"torch.{dtype}"}
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["torch_dtype"] == dtype and config["eos_token_id"] == 0
    hashes = json.loads((tmp_path / "out/manifest.json").read_text())["sha256"]
    for name in ("config.json", "model.safetensors", "tokenizer.json", "golden.json"):
        assert hashes[name] == hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest()
    difference = verify(decoder, tmp_path / "out")
    assert difference is not None and difference < 1e-4
