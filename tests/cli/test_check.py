"""What inkstream check prints about a model that it accepts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from app.__main__ import main
from app.cli import check
from model.checkpoint.checkpoint import load
from model.checkpoint.golden_export import golden_loss
from model.files import write_files
from tests.support.model.hub_checkpoints import save_reference
from tests.support.model.quantized_checkpoints import pack_quantized, quantize_checkpoint
from tests.support.model.tiny_models import round_weights, tiny_config, tiny_decoder, tiny_files, tiny_weights


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(0, None), ([0, 1], None), (1, '0 "<|endoftext|>"')],
    ids=["the files agree", "one names more", "they differ"],
)
def test_end_tokens_that_only_a_chat_has_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], generation: object, expected: str | None
) -> None:
    weights = tiny_weights(tmp_path / "weights")
    config = json.loads((weights / "config.json").read_text())
    (weights / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    (weights / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert main(["check", str(weights)]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    found = [line.removeprefix("EOS of chats").strip() for line in lines if line.startswith("EOS of chats")]
    assert found == ([f"also {expected}: the files name different tokens"] if expected else [])


def _quantize_lines(directory: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["check", str(directory)]) == 0
    return dict(re.findall(r"^  (int\d) +(.+)$", capsys.readouterr().out, re.MULTILINE))


def test_bits_per_weight_and_the_loss_on_the_golden_text_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decoder = tiny_decoder(tiny_config(width=256, mlp_width=512))
    write_files(tmp_path, tiny_files(decoder, list(range(20, 60))))
    found = _quantize_lines(tmp_path, capsys)
    for kind, least, most in (("int8", 8.5, 8.6), ("int4", 4.7, 5.6)):
        bits, loss = re.fullmatch(
            r"([\d.]+) bits per weight, ([+-][\d.]+)% bits per byte of golden.json", found[kind]
        ).groups()  # type: ignore[union-attr]
        assert least <= float(bits) <= most and abs(float(loss)) < 20
    own = golden_loss(round_weights(decoder, "int4"), tmp_path)
    assert own is not None and found["int4"].endswith(f", {own:+.2%} bits per byte of golden.json")


def test_weights_that_cannot_be_quantized_are_valid_and_say_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decoder = tiny_decoder()
    decoder.blocks[0].attention.out.weight *= 1e-6  # type: ignore[operator, union-attr]
    write_files(tmp_path, tiny_files(decoder))
    for text in _quantize_lines(tmp_path, capsys).values():
        assert "blocks.0.attention.out.weight has " in text and text.endswith("use --quantize none")


def test_matrices_that_no_group_divides_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(tmp_path, tiny_files(tiny_decoder(tiny_config(mlp_width=168))))
    for text in _quantize_lines(tmp_path, capsys).values():
        assert "2 of 9 matrices are not quantized" in text and text.endswith("and their sizes are 64 x 168")


def test_bits_of_packed_files_are_printed_once(tmp_path: Path) -> None:
    """--quantize leaves what is packed as it is; lines about it are for matrices that it would change."""
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
    kinds = {}
    for name, ends in (("all", ("proj.weight", "embed_tokens.weight", "lm_head.weight")), ("some", ("proj.weight",))):
        save_reference("llama-b", tmp_path / name, **sizes)
        quantize_checkpoint(tmp_path / name, pack_quantized(64), config, ends=ends)
        loaded = load(tmp_path / name, device=torch.device("cpu"), dtype=torch.float32)
        line = dict(check._file_lines(loaded.weights))["packed"]
        kinds[name] = [kind for kind, _ in check._quantize_lines(loaded.weights, loaded.decoder, tmp_path / name)]
        bits = 8 * loaded.weights.stored_bytes("bfloat16") / loaded.weights.n_params
        assert line.endswith(
            f"matrices of 4 bits in groups of 64; {bits:.3g} bits per weight with all others in bfloat16"
        )
    assert kinds == {"all": [], "some": ["int8", "int4"]}
