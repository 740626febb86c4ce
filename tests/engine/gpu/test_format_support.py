"""A weight format that a GPU or its torch does not support is refused with what to change."""

from __future__ import annotations

import pytest
import torch

from app.engine.gpu.format_support import check_quantize, describe_unsupported
from model.config import ModelConfig
from tests.support.model.tiny_models import mixture_config, tiny_config


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "version", "reason"),
    [
        (
            "cpu",
            torch.bfloat16,
            None,
            "2.13.0",
            "requires a GPU, and the device is cpu: use --quantize int8, int4 or none",
        ),
        (
            "cuda",
            torch.bfloat16,
            (8, 6),
            "2.13.0",
            r"capability 8\.9 or newer .* has 8\.6: use --quantize int8, int4 or none",
        ),
        ("cuda", torch.float32, (9, 0), "2.13.0", "computes in bfloat16: use --dtype bfloat16 or auto"),
        (
            "cuda",
            torch.bfloat16,
            (8, 9),
            "2.11.0+cu130",
            r"8\.9 requires torch 2\.12 or newer, and this is 2\.11\.0\+cu130",
        ),
    ],
)
def test_fp8_is_refused_where_unsupported(
    device: str, dtype: torch.dtype, capability: tuple[int, int] | None, version: str, reason: str
) -> None:
    check_quantize("fp8", "cuda", torch.bfloat16, (8, 9), "2.12.0")
    check_quantize("fp8", "cuda", torch.bfloat16, (9, 0), "2.11.0+cu130")
    check_quantize("int8", device, dtype, capability, version)
    with pytest.raises(ValueError, match=reason):
        check_quantize("fp8", device, dtype, capability, version)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (tiny_config(), None),
        (tiny_config(sinks=True, activation="swiglu_clamped"), None),
        (tiny_config(n_encoder_layers=1), "an encoder"),
        (mixture_config(), None),
    ],
)
def test_models_that_tritons_kernels_do_not_compute_are_named(config: ModelConfig, words: str | None) -> None:
    wanted = words and f"the model has {words}, which Triton's kernels do not compute"
    assert describe_unsupported(config) == wanted
