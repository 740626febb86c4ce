"""FLOPs of a token by hand, and peaks of devices by their names."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from model.nn.transformer import Decoder
from model.presets import preset
from model.train.setup import resources
from model.train.setup.resources import flops_per_token, known_peak, peak_flops


def test_flops_of_a_token_are_those_counted_by_hand() -> None:
    """small: 5 layers of q, k, v, out, gate, up, down and two norms; the head is the embedding; a last norm."""
    block = 256 * (512 + 256 + 2 * 704 + 704) + 2 * 256
    expected = 6 * (5 * block + 4096 * 256 + 256) + 12 * 5 * 256 * 512
    assert flops_per_token(preset("small"), 512) == expected


def test_what_is_only_looked_up_is_not_multiplied() -> None:
    config = preset("standalone")
    assert not config.tied_head and config.positions == "learned"
    looked_up = (config.vocab_size + config.context) * config.width
    multiplied = Decoder(config).n_params - looked_up
    assert flops_per_token(config, 0) == 6 * multiplied


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla T4", None),
        ("NVIDIA GeForce RTX 2080 Ti", None),
    ],
)
def test_a_peak_is_the_data_sheets_or_unknown(name: str, tera: float | None) -> None:
    assert known_peak(name) == (None if tera is None else tera * 1e12)


def test_a_cpu_is_measured_and_other_devices_are_unknown() -> None:
    n_threads = torch.get_num_threads()
    peak = peak_flops(torch.device("cpu"), torch.float32)
    assert peak is not None and 1e9 < peak < 1e15
    assert torch.get_num_threads() == n_threads
    assert peak_flops(torch.device("meta"), torch.float32) is None


def test_a_cpus_peak_is_that_of_a_product_whose_kernel_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the first one took longer than the whole measurement, and training said MFU 779 %."""
    took: Iterator[float] = iter([60.0, *[1.0] * 3, *[0.25] * 1000])
    now = 0.0

    def mm(*_: torch.Tensor) -> None:
        nonlocal now
        now += next(took)

    monkeypatch.setattr(resources, "torch", SimpleNamespace(**vars(torch) | {"mm": mm}))
    monkeypatch.setattr(resources, "time", SimpleNamespace(perf_counter=lambda: now))
    peak = peak_flops(torch.device("cpu"), torch.float32)
    assert peak == torch.get_num_threads() * 2 * 512**3 / 0.25
