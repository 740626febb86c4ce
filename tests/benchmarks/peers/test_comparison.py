"""The pure parts of the comparison with peers: plan, numbers, shapes, names, tables. Installs and measures nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.common import range_of
from benchmarks.peers.adapters.gguf_names import convert_layout, gguf_name
from benchmarks.peers.adapters.protocol import prompts_of
from benchmarks.peers.engines import EngineResult, limits_of
from benchmarks.peers.plan import Sizes, common_prefix_length, figures, length_error, parse_options, schedule
from benchmarks.peers.report import engine_table, ratio, ratios, server_table
from benchmarks.peers.servers import Sample, ServerResult
from benchmarks.peers.shapes import SHAPES, random_decoder, write_random
from benchmarks.prompts import pseudo_prose
from benchmarks.roofline import Limits, ModelSize, size_of, work_of
from model.checkpoint.checkpoint import load
from model.config import ModelConfig
from model.families.registry import family_of
from model.nn.transformer import Decoder
from model.tokenizer.tokenizer import Tokenizer

TINY = {"vocab_size": 512, "width": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16}
LIMITS = Limits(read={1 << 20: 100.0, 4 << 20: 50.0}, multiply={"bf16": 8.0, "f32": 2.0})


def test_each_round_asks_every_side_once_for_every_figure_and_begins_with_another_side() -> None:
    found = list(schedule(["a", "b", "c"], [1, 8], 4))
    assert Counter(found) == Counter((r, f, s) for r in range(4) for f in (1, 8) for s in "abc")
    assert [round_ for round_, _, _ in found] == sorted(round_ for round_, _, _ in found)
    assert [s for r, f, s in found if f == 8] == [*"abc", *"bca", *"cab", *"abc"]


def test_a_schedule_without_sides_is_empty() -> None:
    assert not list(schedule([], [1], 3))


def test_no_sequence_is_longer_than_the_context() -> None:
    assert [figure.title for figure in figures(["engine", "prefill"], Sizes(), 1024)] == [
        "decode x1",
        "decode x8",
        "decode x32",
        "prefill 512",
    ]
    (prefill,) = figures(["prefill"], Sizes(), 512)
    assert prefill.prompt + prefill.tokens == 512
    assert not figures(["server"], Sizes(), 512)


@pytest.mark.parametrize("lengths", [[128, 127], [128], [128, 128, 128], [256, 0], []])
def test_another_number_of_tokens_than_asked_for_is_refused(lengths: list[int]) -> None:
    assert length_error(2, 128, [128, 128]) is None
    assert (length_error(2, 128, lengths) or "").startswith("asked for 2 x 128 tokens, it generated")


def test_agreement_counts_the_tokens_before_the_first_difference() -> None:
    assert [common_prefix_length([1, 2, 3], other) for other in ([1, 2, 3], [1, 2, 4], [9, 2, 3], [1])] == [3, 2, 0, 3]


def test_ratios_are_taken_round_by_round() -> None:
    found = ratio({0: 10.0, 1: 100.0, 2: 30.0, 4: 7.0}, {0: 5.0, 1: 50.0, 2: 10.0, 3: 1.0})
    assert found == range_of([2.0, 2.0, 3.0])
    assert ratio({0: 1.0}, {1: 1.0}) is None


def test_bandwidth_lies_between_what_was_measured_and_stays_beyond() -> None:
    assert [LIMITS.bandwidth(mib * 2**20) for mib in (0.1, 1, 2, 4, 100)] == pytest.approx([100, 100, 75, 50, 50])


def test_the_limit_of_a_step_is_the_longer_one_of_reading_and_multiplying() -> None:
    size = ModelSize(body=1000, head=24, kv_per_token=8)
    one = work_of(size, tokens=1, rows=1, kept=10, precision="bf16")
    assert (one.bytes_read, one.operations) == (2 * 1024 + 2 * 80, 2 * 1024)
    assert LIMITS.least_seconds(one) == pytest.approx(2048 / 8)
    many = work_of(size, tokens=64, rows=1, kept=0, precision="f32")
    assert (many.bytes_read, many.operations) == (4 * 1024, 2 * (64 * 1000 + 24))
    slow = Limits(read={1: 1.0}, multiply={"bf16": 1e9})
    assert slow.least_seconds(one) == one.bytes_read


def test_the_limits_are_medians_of_the_rounds() -> None:
    answers = [{"read": {"8": x}, "multiply": {"bf16": 2 * x}} for x in (1.0, 9.0, 2.0)]
    assert limits_of(answers) == Limits(read={8: 2.0}, multiply={"bf16": 4.0})


@pytest.mark.parametrize(("name", "millions"), [("A", 124.4), ("B", 134.5), ("C", 15.7)])
def test_the_shapes_have_the_sizes_that_are_told(name: str, millions: float) -> None:
    with torch.device("meta"):
        decoder = Decoder(SHAPES[name])
    assert decoder.n_params / 1e6 == pytest.approx(millions, abs=0.05)
    matrices = [p.numel() for n, p in decoder.named_parameters() if p.dim() == 2 and n != "position_embedding"]
    size = size_of(SHAPES[name])
    assert size.body + size.head == sum(matrices)


@pytest.mark.usefixtures("one_thread")
def test_a_random_checkpoint_is_whole_and_its_tokenizer_has_as_many_tokens(tmp_path: Path) -> None:
    config = ModelConfig(**TINY, mlp_width=96, context=64)
    write_random(config, tmp_path)
    loaded = load(tmp_path, device=torch.device("cpu"), dtype=torch.bfloat16).decoder
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == loaded.config.vocab_size == 512
    assert len(tokenizer.encode(pseudo_prose(index=1, words=64, seed=0))) < 100
    again = random_decoder(config).bfloat16().state_dict()
    assert all(torch.equal(value, again[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize("shape", ["A", "C"])
def test_every_tensor_has_a_name_of_its_own_in_a_gguf_file(shape: str) -> None:
    config = SHAPES[shape]
    theirs = [name for mapping in family_of(config).mappings(config) for name, _ in mapping.source]
    names = [gguf_name(name) for name in theirs]
    assert len(set(names)) == len(names)
    assert {"token_embd.weight", "output_norm.weight", "blk.7.ffn_down.weight", "blk.0.attn_norm.weight"} <= set(names)
    attention = {"attn_qkv", "attn_output"} if shape == "A" else {"attn_q", "attn_k", "attn_v", "attn_output"}
    assert {f"blk.1.{name}.weight" for name in attention} <= set(names)


def test_a_tensor_of_another_family_has_no_name() -> None:
    with pytest.raises(KeyError):
        gguf_name("gpt_neox.layers.0.attention.dense.weight")


def test_halves_of_a_head_become_neighbours() -> None:
    rows = np.arange(8.0).reshape(8, 1) * [[1.0, 10.0]]  # two heads of four rows
    found = convert_layout("model.layers.0.self_attn.q_proj.weight", rows, heads=2, kv_heads=1)
    assert found[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    one = convert_layout("model.layers.0.self_attn.k_proj.weight", rows, heads=2, kv_heads=1)
    assert one[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_gpt2_matrices_are_turned_round_and_all_else_stays() -> None:
    values = np.arange(6.0).reshape(2, 3)
    for name in ("transformer.h.0.attn.c_attn.weight", "transformer.h.3.mlp.c_proj.weight"):
        assert np.array_equal(convert_layout(name, values, heads=1, kv_heads=1), values.T)
    for name in (
        "transformer.wte.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
    ):
        assert convert_layout(name, values, heads=1, kv_heads=1) is values


def test_every_side_reads_the_same_prompts_and_no_round_another_ones() -> None:
    first = prompts_of(vocab_size=50, rows=8, length=64, seed=1)
    assert first == prompts_of(vocab_size=50, rows=8, length=64, seed=1)
    assert first != prompts_of(vocab_size=50, rows=8, length=64, seed=2)
    assert {len(prompt) for prompt in first} == {64} and all(0 < token < 50 for p in first for token in p)


def test_the_table_tells_ratios_the_limit_and_who_is_missing() -> None:
    result = EngineResult(
        model="C",
        precision="bf16",
        n_params=15_700_000,
        facts={"inkstream": {}, "openvino": {}},
        missing={"ctranslate2": "it computes float32 on this CPU"},
        speeds={"decode x1": {"inkstream": {0: 300.0, 1: 330.0}, "openvino": {0: 600.0, 1: 600.0}}},
        same_tokens={"decode x1": {"openvino": 17}},
        limits=LIMITS,
        fastest={"decode x1": 1000.0},
    )
    table = engine_table(result)
    assert "315 [300-330]" in table and "600 [600-600]  0.53x  60%" in table
    assert "not there: it computes float32 on this CPU" in table and "decode x1: openvino 17" in table
    assert ratios(result.speeds["decode x1"]) == {"openvino": pytest.approx(0.525)}


def test_the_table_of_services_has_a_row_for_each_side_at_each_number_of_streams() -> None:
    sample = Sample(tokens_per_second=400, first_p50=9, first_p99=20, gap_p50=2, gap_p99=8)
    half = Sample(tokens_per_second=200, first_p50=15, first_p99=30, gap_p50=3, gap_p99=9)
    table = server_table(
        ServerResult(
            model="C",
            precision="bf16",
            facts={},
            missing={"openvino in process": "its process ended with -9: without a word"},
            samples={n: {"inkstream": {1: sample}, "llama.cpp": {1: half}} for n in (1, 8)},
        )
    )
    rows = [line.split() for line in table.splitlines() if "200 [200-200]" in line]
    assert [row[0] for row in rows] == ["1", "8"] and all(
        "2.00x" in row and row[-3:] == ["3.00", "/", "9.00"] for row in rows
    )
    assert "not there: its process ended with -9" in table


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--models", "D"], "'D' is none of default, A, B, C"),
        (["--peers", "vllm"], "'vllm' is none of openvino"),
        (["--rounds", "0"], "'0' is not a whole number from 1 on"),
        (["--streams", "1,64"], "64 is more than 32"),
    ],
)
def test_a_flag_that_means_nothing_is_told_in_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse_options(flags)
    assert end.value.code == 2 and message in capsys.readouterr().err
