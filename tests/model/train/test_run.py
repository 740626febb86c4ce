"""A whole run: its output, its files, and that transformers and the service read the result."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file

from model.checkpoint.checkpoint import load
from model.checkpoint.golden_export import verify
from model.checkpoint.manifest import read_model_name
from model.families.registry import family_of
from model.nn.reference import generate, logits
from model.presets import PRESET_NAMES, SIZES, preset
from model.tokenizer.tokenizer import Tokenizer
from model.train.reporting.metrics_log import read_records
from model.train.step.trainer import Trainer, select_prefix
from tests.support.lazy_modules import transformers
from tests.support.model.hub_checkpoints import reference_logits
from tests.support.model.tiny_models import TEXT
from tests.support.model.training_runs import EXACT, TINY, is_identical, signal_after, state_of, train, weights_of

pytestmark = pytest.mark.slow

FLAGS = ["--steps", "12", *EXACT, *TINY]


def _log(out: Path) -> list[dict[str, Any]]:
    timed = ("seconds", "tokens_per_second", "mfu")
    return [
        {k: v for k, v in record.items() if k not in timed} for record in read_records(out / "log.jsonl", start_step=99)
    ]


def test_run_trains_and_writes_all_its_files(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, unseen = tmp_path / "out", tmp_path / "unseen_1.txt"
    unseen.write_text("It was never seen that a fox could read what a hen had written. " * 20)
    flags = ["--steps", "60", *EXACT, *TINY, "--license", "mit", "--name", "plays", "--unseen", str(unseen)]
    prompts = ["\u201cWho are", '"Who are']
    assert train(text, out, *flags, *(word for prompt in prompts for word in ("--sample-prompt", prompt))) == 0
    shown = capsys.readouterr().out
    printed = shown.splitlines()
    assert [line.split()[0] for line in printed[:3]] == ["model:", "data:", "plan:"]
    assert "60 steps, 7,680 tokens" in printed[2]
    assert [line.split()[0] for line in printed[-4:]] == ["held-out", "unseen", "written:", "serve"]
    assert printed[-1].endswith(f" -m app serve --weights {out}")
    log = _log(out)
    assert [record["step"] for record in log] == list(range(1, 61))
    assert log[-1]["held_out_whole"] < 0.7 * log[0]["bits_per_byte"]
    assert ElementTree.parse(out / "loss.svg").getroot().tag.endswith("svg")
    page, card = (out / "samples.md").read_text(), (out / "README.md").read_text()
    assert page.count("\n## ") == page.count("**100 %**, step 60, training") == 2
    assert all(f"\n## {prompt}\n" in page and f"> {prompt}" in page and f"--- {prompt}" in shown for prompt in prompts)
    assert "\n# plays\n" in card and read_model_name(out) == "plays"
    assert card.startswith('---\nlicense: "mit"\n') and r"| never seen: unseen\_1.txt | " in card
    assert load(out, device=torch.device("cpu"), dtype=torch.float32).weights.version in card
    assert str(tmp_path) not in card.partition("Command:")[0] and "| seed | 1 |" in card
    generation = json.loads((out / "generation_config.json").read_text())
    assert (generation["temperature"], generation["top_p"], generation["repetition_penalty"]) == (0.8, 0.95, 1.05)


def test_samples_and_averages_change_no_step_and_a_signal_takes_precedence(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling uses its own random generator and leaves no state; the exported weights are the average."""
    assert train(text, tmp_path / "without", *FLAGS) == 0
    monkeypatch.setattr("model.train.reporting.report._MAX_SAMPLE_SHARE", 1e6)
    assert train(text, tmp_path / "with", *FLAGS, "--ema", "0.9", "--keep", "last") == 0
    assert [record["step"] for record in _log(tmp_path / "with") if "samples" in record] == [1, 3, 6, 12]
    losses = [[record["loss"] for record in _log(tmp_path / name)] for name in ("with", "without")]
    assert losses[0] == losses[1]
    (_, averaged), (_, plain) = (state_of(tmp_path / name) for name in ("with", "without"))
    assert is_identical(select_prefix("decoder", averaged), select_prefix("decoder", plain))
    exported = weights_of(tmp_path / "with")["model.embed_tokens.weight"]
    assert torch.equal(exported, averaged["ema.embedding"]) and not torch.equal(exported, plain["decoder.embedding"])
    assert "average of the last steps (decay 0.9) after the last step" in (tmp_path / "with/README.md").read_text()
    signal_after(1, monkeypatch)
    assert train(text, tmp_path / "out", *FLAGS) == 143
    assert not (tmp_path / "out/samples.md").exists()


def test_out_of_memory_is_one_line(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "gradients", lambda *_: torch.empty(1 << 62, dtype=torch.int8))
    assert train(text, tmp_path / "out", "--steps", "1") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: out of memory") and error.count("\n") == 1


def test_terminal_without_unicode_does_not_lose_the_result(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "printed").open("w", encoding="ascii") as printed:
        monkeypatch.setattr("sys.stdout", printed)
        assert train(text, tmp_path / "out", "--steps", "1", "--sample-prompt", "\u201cI don\u2019t") == 0
    assert "?I don?t" in (tmp_path / "printed").read_text()


def test_presets_with_a_hugging_face_family() -> None:
    families = {name: family_of(preset(name)).name for name in PRESET_NAMES}
    assert {name for name, family in families.items() if family == "llama"} == set(SIZES)
    assert {name for name, family in families.items() if family == "gpt2"} == {"gpt"}
    assert (family_of(preset("small", "gpt")).name, family_of(preset("small", "textbook")).name) == (
        "gpt2",
        "inkstream",
    )


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        (["--preset", "small"], "float32"),
        (["--preset", "gpt"], "float16"),
        (["--preset", "nano", "--arch", "gpt"], "bfloat16"),
    ],
)
def test_transformers_reads_the_result_like_we_do(tmp_path: Path, text: Path, flags: list[str], dtype: str) -> None:
    size = ["--layers", "2", "--width", "64", "--heads", "4", "--steps", "8", "--export-dtype", dtype]
    out = tmp_path / "out"
    assert train(text, out, *flags, *size) == 0
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, dtype=torch.float32
    )
    assert not any(report.values()), report
    decoder, read = load(out, device=torch.device("cpu"), dtype=torch.float32).decoder, theirs.eval()
    ours, other = Tokenizer.load(out), transformers.AutoTokenizer.from_pretrained(out)
    ids = other(TEXT[90:150] + "<|endoftext|>caf\u00e9 \U0001f98a")["input_ids"]
    assert ids == ours.encode(TEXT[90:150] + "<|endoftext|>caf\u00e9 \U0001f98a")
    assert (other.eos_token_id, other.bos_token_id) == (ours.eos_id, ours.bos_id) == (0, 0)
    assert (logits(decoder, ids[:32]) - reference_logits(read, ids[:32])).abs().max() < 1e-4
    written = read.generate(
        torch.tensor([ids[:5]]), max_new_tokens=20, do_sample=False, eos_token_id=None, repetition_penalty=1.0
    )
    assert generate(decoder, ids[:5], 20) == written[0, 5:].tolist()
    assert {str(t.dtype) for t in load_file(out / "model.safetensors").values()} == {f"torch.{dtype}"}
    config = json.loads((out / "config.json").read_text())
    assert config["torch_dtype"] == dtype and config["eos_token_id"] == 0
    hashes = json.loads((out / "manifest.json").read_text())["sha256"]
    for name in ("config.json", "model.safetensors", "tokenizer.json", "golden.json"):
        assert hashes[name] == hashlib.sha256((out / name).read_bytes()).hexdigest()
    difference = verify(decoder, out)
    assert difference is not None and difference < 1e-4
