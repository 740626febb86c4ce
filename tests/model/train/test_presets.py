"""Every preset of the notebooks trains with the project's own script, from text, lines or pairs, and is served."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from model.checkpoint.checkpoint import load
from model.checkpoint.model_summary import shape_lines
from model.config import ConfigError
from model.nn.reference import generate
from model.presets import ARCHS, PRESET_NAMES, SIZES, preset, reshaped
from model.tokenizer.tokenizer import Tokenizer
from model.train.__main__ import main
from model.train.loop import Loop
from model.train.options import parse, shape
from model.train.run import Run
from tests.support.completion_client import fetch_completion, joined_text, stream
from tests.support.model.tiny_models import TEXT
from tests.support.model.training_runs import EXACT, shorten_samples
from tests.support.servers import running_server

pytestmark = pytest.mark.slow

STATQUEST = "what is statquest <EOS> awesome <EOS>\nstatquest is what <EOS> awesome <EOS>\n"
TINY = ["--layers", "2", "--width", "32", "--heads", "4", "--device", "cpu"]
WORDS = ["--tokenizer", "words", "--context", "16"]


def _reversed_digits(n: int, *, seed: int) -> list[tuple[str, str]]:
    chance, found = random.Random(seed), set()
    while len(found) < n:
        found.add(tuple(chance.choice("0123456789") for _ in range(3)))
    return [(" ".join(digits), " ".join(reversed(digits))) for digits in sorted(found)]


def _write_pairs(path: Path, pairs: list[tuple[str, str]]) -> str:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return str(path)


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_samples(monkeypatch)


@pytest.fixture
def data(tmp_path: Path) -> dict[str, list[str]]:
    """Flags for the data in each form."""
    (tmp_path / "text.txt").write_text(TEXT * 3)
    (tmp_path / "lines.txt").write_text(STATQUEST)
    pairs = _write_pairs(tmp_path / "pairs.tsv", _reversed_digits(200, seed=1))
    text = ["--data", str(tmp_path / "text.txt"), "--vocab-size", "300", "--context", "32", "--windows", "4"]
    return {"text": text, "lines": ["--data", str(tmp_path / "lines.txt")], "pairs": ["--pairs", pairs, *WORDS]}


@pytest.mark.parametrize(
    ("name", "form", "flags"),
    [
        ("textbook", "text", [*TINY, "--steps", "50"]),
        ("standalone", "text", [*TINY, "--steps", "50"]),
        ("gpt", "text", [*TINY, "--steps", "80", "--optimizer", "adamw", "--end-token", "<END>"]),
        ("toy", "lines", ["--steps", "60"]),
        ("cross", "pairs", [*TINY, "--steps", "50"]),
    ],
)
def test_each_preset_trains_saves_loads_and_streams_its_whole_completion(
    tmp_path: Path, data: dict[str, list[str]], name: str, form: str, flags: list[str]
) -> None:
    out = tmp_path / "out"
    run = Run(parse(["--preset", name, "--out", str(out), *data[form], *flags, *EXACT]), "the command")
    before, batch = run.loop.bits_per_byte(), run.dataset.batch(0)
    first = float(run.objective.loss_sum(batch).detach())
    run.train()
    assert float(run.objective.loss_sum(batch).detach()) < 0.9 * first
    assert run.loop.bits_per_byte() < 0.9 * before
    decoder = load(out, device=torch.device("cpu"), dtype=torch.float32).decoder
    assert decoder.config == run.shape
    prompt = run.dataset.prompts[0]
    generated = generate(decoder, prompt.tokens[:3], 3, source=prompt.source)
    assert generated == generate(run.decoder, prompt.tokens[:3], 3, source=prompt.source)
    assert len(generated) == 3
    card = (out / "README.md").read_text()
    assert all(f"| {what} | {text} |" in card for what, text in shape_lines(run.shape)) and "llama" not in card
    if name in ("standalone", "toy"):  # test_parity_switches.py covers their switches
        return
    given = {"source": "1 2 3"} if form == "pairs" else {"prompt": "Once upon a time", "ignore_eos": True}
    with running_server(tmp_path, out, "--dtype", "float32") as server:
        body = {**given, "max_tokens": 14, "seed": 3}
        response = fetch_completion(server.url, **body)
        assert form == "pairs" or response["usage"]["completion_tokens"] == 14
        assert joined_text(stream(server.url, **body)) == response["choices"][0]["text"]


def test_toy_preset_answers_both_questions_with_its_data_flag_only(
    tmp_path: Path, data: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["--preset", "toy", *data["lines"], "--out", str(out)]) == 0
    tokenizer = Tokenizer.load(out)
    for dtype in (torch.float32, torch.bfloat16):
        decoder = load(out, device=torch.device("cpu"), dtype=dtype).decoder
        for question in ("what is statquest <EOS>", "statquest is what <EOS>"):
            response = generate(decoder, tokenizer.encode(question), 2, eos_ids=(0,))
            assert response == tokenizer.encode("awesome <EOS>")
    printed = capsys.readouterr().out
    assert "held-out: none, 2 lines are too few; bits per byte are of the training lines" in printed
    assert "training bits per byte 0.0" in printed


def test_encoder_decoder_learns_from_pairs_to_reverse_unseen_digits(tmp_path: Path, data: dict[str, list[str]]) -> None:
    pairs = _reversed_digits(700, seed=2)
    unseen = set(random.Random(3).sample(pairs, 40))
    _write_pairs(tmp_path / "pairs.tsv", [pair for pair in pairs if pair not in unseen])
    flags = [*data["pairs"], *TINY, "--layers", "1", "--steps", "100", "--out", str(tmp_path / "out")]
    run = Run(parse(["--preset", "cross", *flags]), "")
    run.train()
    tokenizer, right = run.dataset.tokenizer, 0
    for source, target in sorted(unseen):
        read, expected = tokenizer.encode_many([source, target])
        right += generate(run.decoder, tokenizer.encode(""), 8, source=read, eos_ids=(0,)) == [*expected, 0]
    assert right >= 38


def test_pairs_need_only_the_flag_of_their_file_even_if_it_is_tiny(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "done", property(lambda loop: loop.step / min(loop.limits.steps, 3)))
    path = _write_pairs(tmp_path / "translations.tsv", [("the moon", "der Mond"), ("the night", "die Nacht")])
    flags = ["--preset", "cross", "--pairs", path, "--out", str(tmp_path / "out"), *TINY]
    assert parse(flags).steps > 1000
    assert main(flags) == 0
    size = Tokenizer.load(tmp_path / "out").vocab_size
    printed = capsys.readouterr().out
    assert f"a vocabulary of {size}, the maximum for this text" in printed and "held-out: none" in printed
    assert 257 < size < 300
    assert main([*flags, "--overwrite", "--vocab-size", str(size + 1)]) == 2
    assert f"supports only {size} tokens" in capsys.readouterr().err


def test_shape_flags_keep_the_proportions_of_the_preset() -> None:
    config = shape(parse(["--preset", "textbook", "--data", "x", "--out", "y", "--steps", "1", *TINY]))
    assert (config.n_layers, config.width, config.n_heads, config.n_kv_heads, config.head_dim) == (2, 32, 4, 4, 8)
    assert (config.mlp_width, config.embedding_scale) == (128, 32**0.5)
    small = preset("small")
    assert reshaped(small) == small
    assert reshaped(small, n_heads=8).n_kv_heads == 4
    assert reshaped(small, n_heads=3, width=96).n_kv_heads == 3
    assert reshaped(small, mlp_width=100).mlp_width == 100
    assert reshaped(preset("cross"), n_layers=5).n_encoder_layers == 5
    with pytest.raises(ConfigError, match="multiple"):
        reshaped(small, width=250)


def test_every_size_has_the_same_depth_and_width_in_every_layout() -> None:
    for name in SIZES:
        llama, gpt, textbook = (preset(name, arch) for arch in ARCHS)
        assert len({(c.n_layers, c.width, c.n_heads, c.vocab_size, c.context) for c in (llama, gpt, textbook)}) == 1
        assert llama == preset(name)
        assert (gpt.norm_position, gpt.positions, gpt.activation) == ("pre", "learned", "gelu")
        assert (textbook.norm_position, textbook.positions, textbook.activation) == ("post", "sinusoidal", "relu")
    assert set(SIZES) < set(PRESET_NAMES)
    described = {name: "; ".join(" ".join(line) for line in shape_lines(preset(name))) for name in PRESET_NAMES}
    assert "5 layers x 256, " in described["small"] and "4 heads, 2 kv heads, head_dim 64" in described["small"]
    assert "n_encoder_layers 3" in described["cross"]
