"""--dry-run and --preset auto: the forecast matches the run, and no files are written; FLOPs computed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model.nn.transformer import Decoder
from model.presets import preset
from model.train import dry_run
from model.train.__main__ import main
from model.train.data.batch import Batch
from model.train.dry_run import choose_preset, resolve_preset
from model.train.options import parse, shape
from model.train.resources import flops_per_token, peak_flops, sizes
from model.train.step.optimizer import ParameterUpdates
from model.train.training_checkpoint import load_snapshot
from tests.support.model.tiny_models import TEXT

pytestmark = pytest.mark.slow

TINY = ["--layers", "2", "--width", "32", "--heads", "4", "--windows", "4", "--device", "cpu", "--dtype", "float32"]


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Flags of a small run on plain text."""
    (tmp_path / "text.txt").write_text(TEXT * 20)
    data = ["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")]
    return [*data, "--preset", "nano", "--vocab-size", "300", "--context", "32", *TINY]


def test_dry_run_prints_the_whole_forecast_and_writes_nothing(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "--steps", "7", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line for line in printed.splitlines()}
    assert set(rows) == {"parameters", "one", "text", "disk", "steps", "speed", "time", "memory", "it"}
    assert "1 documents, " in rows["text"]
    assert "7 of 128 tokens" in rows["steps"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


@pytest.mark.parametrize(
    ("name", "optimizer", "ema"), [("nano", "muon", 0.0), ("standalone", "adamw", 0.9), ("cross", "muon", 0.0)]
)
def test_estimated_sizes_match_the_real_ones(name: str, optimizer: str, ema: float) -> None:
    decoder = Decoder(preset(name))
    estimate = sizes(decoder, optimizer, ema=ema, export_dtype="bfloat16")  # type: ignore[arg-type]
    optimiser = ParameterUpdates(decoder, optimizer, matrix_lr=0.1, other_lr=0.1, weight_decay=0.0)  # type: ignore[arg-type]
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step(0.0)
    numbers = [t.nbytes for t in optimiser.tensors().values() if t.ndim]
    assert estimate.optimizer == sum(numbers)
    assert estimate.weights == sum(p.nbytes for p in decoder.parameters()) == 2 * estimate.result
    assert estimate.average == (estimate.weights if ema else 0)


def test_estimated_disk_matches_the_disk_used(flags: list[str], tmp_path: Path) -> None:
    assert main([*flags, "--steps", "3"]) == 0
    snapshot = load_snapshot(tmp_path / "out/.training")
    assert snapshot
    used = sum(tensor.nbytes for tensor in snapshot[1].values())
    options = parse([*flags, "--steps", "3"])
    estimate = sizes(Decoder(shape(options)), options.optimizer, ema=0.0, export_dtype="bfloat16")
    assert 0.6 * estimate.in_memory < used <= 1.01 * estimate.in_memory
    result = (tmp_path / "out/model.safetensors").stat().st_size
    assert estimate.result <= result < estimate.result + 10_000


@pytest.mark.parametrize(
    ("megabytes", "tokens_per_second", "minutes", "expected", "because"),
    [
        (0.1, 1e9, 1e6, "nano", "8 epochs of this text has"),
        (20, 1e9, 1e6, "small", "base wants 72.78 M tokens or more, 8 epochs of this text"),
        (20, 1000, 10, "nano", "nano wants 4.35 M tokens or more, this run has 600,000"),
        (4000, 100_000, 60, "base", "medium wants 440.50 M tokens or more, this run has 360.00 M"),
        (4000, 1e9, 60, "medium", "the largest"),
    ],
)
def test_auto_chooses_the_largest_size_for_text_and_time(
    megabytes: float,
    tokens_per_second: float,
    minutes: float,
    expected: str,
    because: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(_config: object, _options: object, _device: object, batch: Batch) -> float:
        return batch.n_targets / tokens_per_second

    monkeypatch.setattr(dry_run, "measure", seconds)
    options = parse(["--data", "x", "--out", "y", "--max-minutes", str(minutes), "--preset", "auto"])
    chosen, why = choose_preset(options, round(megabytes * 1e6))
    assert chosen == expected
    assert because in why


def test_resumed_run_keeps_the_chosen_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    data = ["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"), "--context", "32", *TINY]
    assert main([*data, "--preset", "auto", "--steps", "1"]) == 0
    assert "--preset auto takes nano: the smallest; nano wants" in capsys.readouterr().out
    monkeypatch.setattr(dry_run, "choose_preset", None)
    options = parse([*data, "--preset", "auto", "--steps", "2", "--resume"])
    resolve_preset(options)
    assert options.preset == "nano"


def test_flops_per_token_match_a_count_by_hand() -> None:
    """small: 5 layers of q, k, v, out, gate, up, down and two norms; the head is the embedding; a last norm."""
    block = 256 * (512 + 256 + 2 * 704 + 704) + 2 * 256
    assert flops_per_token(preset("small"), 512) == 6 * (5 * block + 4096 * 256 + 256) + 12 * 5 * 256 * 512
    config = preset("standalone")
    looked_up = (config.vocab_size + config.context) * config.width
    assert flops_per_token(config, 0) == 6 * (Decoder(config).n_params - looked_up)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA L40S", 362),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla T4", None),
    ],
)
def test_peak_flops_come_from_the_data_sheet_or_are_unknown(name: str, tera: float | None) -> None:
    assert peak_flops(name) == (None if tera is None else tera * 1e12)
