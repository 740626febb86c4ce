"""Loss backends: all give the same loss and gradients on every device; handwritten gradients equal autograd's."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.config import QkNorm
from model.device import choose_dtype
from model.nn.attention import CausalAttend
from model.nn.layers import RMSNorm
from model.nn.transformer import Decoder
from model.presets import preset, reshaped
from model.train.data.batch import IGNORE_INDEX, Batch, batch_of_windows
from model.train.step import objective
from model.train.step.attention import TrainingAttend
from model.train.step.objective import LossBackend, Objective, choose_loss_backend, cross_entropy

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
_HANDWRITTEN, _PLAIN = LossBackend(is_handwritten=True), LossBackend()


@pytest.mark.parametrize(
    ("requested", "device", "has_triton", "expected"),
    [
        ("auto", "cpu", True, _HANDWRITTEN),
        ("off", "cpu", True, _HANDWRITTEN),
        ("on", "cpu", False, LossBackend(backend="inductor")),
        ("auto", "cuda", True, LossBackend(backend="inductor", may_fall_back=True)),
        ("auto", "cuda", False, _PLAIN),
        ("off", "cuda", True, _PLAIN),
        ("on", "cuda", True, LossBackend(backend="inductor")),
    ],
)
def test_gpus_compile_and_cpus_use_handwritten_gradients(
    requested: str, device: str, has_triton: bool, expected: LossBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective, "find_spec", lambda _: object() if has_triton else None)
    assert choose_loss_backend(requested, device) == expected


def test_an_encoder_is_never_compiled() -> None:
    assert choose_loss_backend("auto", "cuda", has_encoder=True) == _PLAIN
    with pytest.raises(ValueError, match="encoder is not compiled"):
        choose_loss_backend("on", "cpu", has_encoder=True)


@pytest.mark.parametrize("native", [True, False])
def test_gpu_computes_in_bfloat16_if_supported(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native and not including_emulation)
    assert choose_dtype("auto", torch.device("cuda")) == (torch.bfloat16 if native else torch.float32)


def _decoder(name: str, *, qk_norm: QkNorm = "none", **sizes: Any) -> Decoder:
    """Outputs initialized to zero would hide what is behind them."""
    config = replace(reshaped(preset(name), **{"n_layers": 2, "width": 64, "n_heads": 4, **sizes}), qk_norm=qk_norm)
    decoder = Decoder(config).initialize(3)
    generator = torch.Generator().manual_seed(4)
    for parameter in decoder.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return decoder


def _batch(decoder: Decoder, rows: int = 2, tokens: int = 140) -> Batch:
    generator = torch.Generator().manual_seed(rows)
    return batch_of_windows(torch.randint(0, decoder.config.vocab_size, (rows, tokens + 1), generator=generator))


def _learnt(decoder: Decoder, way: LossBackend, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    objective = Objective(decoder, CPU, dtype, way)
    loss = objective.loss_sum(_batch(decoder), 0.5)
    return [loss.detach(), *torch.autograd.grad(loss, list(decoder.parameters()))]


@pytest.mark.parametrize("qk_norm", ["none", "head"])
@pytest.mark.parametrize(("name", "kv_heads"), [("nano", 1), ("nano", 2), ("nano", 4), ("gpt", 4), ("textbook", 4)])
def test_handwritten_gradients_equal_those_of_autograd(
    name: str, kv_heads: int, qk_norm: QkNorm, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = _decoder(name, n_kv_heads=kv_heads, qk_norm=qk_norm)
    handwritten = _learnt(decoder, _HANDWRITTEN)
    monkeypatch.setattr(RMSNorm, "__call__", lambda norm, x: F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps))
    for plain, ours in zip(_learnt(decoder, _PLAIN), handwritten, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["nano", "gpt"])
def test_compiled_loss_and_gradients_equal_those_of_plain_modules(name: str) -> None:
    """Traced and differentiated by torch's compiler; the code that it generates for a device is not tested here."""
    decoder = _decoder(name, n_layers=1)
    for compiled, plain in zip(
        _learnt(decoder, LossBackend(backend="aot_eager")), _learnt(decoder, _PLAIN), strict=True
    ):
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)


class _LargestOfWords(TorchDispatchMode):
    """The largest number of elements, by format, of tensors with one number per word of the vocabulary."""

    def __init__(self, n_words: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.n_words, self.found = n_words, dict[torch.dtype, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, Tensor) and made.ndim == 2 and made.shape[1] == self.n_words and not func.is_view:
                self.found[made.dtype] = max(self.found.get(made.dtype, 0), made.numel())
        return out


def test_logits_exist_for_a_chunk_of_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With autograd, and in measurements. The positive control is the loss backend for a compiler."""
    decoder = _decoder("gpt")
    batch, n_words = _batch(decoder), decoder.config.vocab_size
    n_tokens, chunk = batch.targets_RN.numel(), 32
    monkeypatch.setattr(objective, "_CHUNK_ELEMENTS", chunk * n_words)
    loss = Objective(decoder, CPU, torch.bfloat16, _PLAIN)
    with _LargestOfWords(n_words) as training:
        torch.autograd.grad(loss.loss_sum(batch), list(decoder.parameters()))
    with _LargestOfWords(n_words) as measuring, torch.no_grad():  # bits_per_byte() does this in threads
        loss._plain(batch, batch.targets_RN.flatten())
    with _LargestOfWords(n_words) as control:
        torch.autograd.grad(loss._whole(batch, batch.targets_RN.flatten()), list(decoder.parameters()))
    assert n_tokens > 4 * chunk and control.found[torch.float32] == n_tokens * n_words
    for mode in (training, measuring):
        assert set(mode.found.values()) == {chunk * n_words}, mode.found


def test_compiled_bfloat16_loss_equals_the_plain_one_and_saves_no_float32_logits() -> None:
    """What the forward pass saves for the backward pass, as torch's compiler for GPUs partitions them."""
    # Imported here: at the top each test process would read the whole compiler, whichever tests it runs.
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    kept: list[tuple[torch.dtype, torch.Size]] = []

    def forward(graph: torch.fx.GraphModule, _: Any) -> Any:
        (outputs,) = next(node.args for node in graph.graph.nodes if node.op == "output")
        values = [node.meta["val"] for node in outputs if isinstance(node, torch.fx.Node)]
        kept.extend((value.dtype, value.shape) for value in values if isinstance(value, Tensor))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.register_backend(compiler_fn=backend, name="keeping")
    decoder = _decoder("nano", n_layers=1)
    ways = (LossBackend(backend="keeping"), _PLAIN)
    for compiled, plain in zip(*(_learnt(decoder, way, torch.bfloat16) for way in ways), strict=True):
        torch.testing.assert_close(compiled, plain, rtol=0.05, atol=0.05)
    logits = torch.Size((_batch(decoder).targets_RN.numel(), decoder.config.vocab_size))
    assert [dtype for dtype, shape in kept if shape == logits] == [torch.bfloat16]


def _fails(*_: Any) -> None:
    raise OSError("no room for a kernel")


def test_failing_compiler_is_a_single_warning_or_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.register_backend(compiler_fn=_fails, name="failing")
    decoder = _decoder("nano")
    objective = Objective(decoder, CPU, torch.float32, LossBackend(backend="failing", may_fall_back=True))
    losses = {float(objective.loss_sum(_batch(decoder)).detach()) for _ in range(2)}
    assert losses == {float(Objective(decoder, CPU, torch.float32, _PLAIN).loss_sum(_batch(decoder)).detach())}
    warned = capsys.readouterr().err
    assert warned.count("\n") == 1 and "no room for a kernel" in warned
    with pytest.raises(ValueError, match=r"--compile on: torch's compiler failed .*no room for a kernel"):
        Objective(decoder, CPU, torch.float32, LossBackend(backend="failing")).loss_sum(_batch(decoder))


def _heads(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(("length", "window"), [(1, None), (7, None), (128, None), (300, None), (300, 40), (300, 200)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 8), (3, 3, 6)])
def test_training_attention_and_its_gradient_equal_the_reference(
    length: int, window: int | None, heads: int, kv_heads: int, head_dim: int
) -> None:
    n_tokens = 2 * length
    qkv = _heads((n_tokens, heads, head_dim), (n_tokens, kv_heads, head_dim), (n_tokens, kv_heads, head_dim))
    weight = torch.randn(n_tokens, heads, head_dim, generator=torch.Generator().manual_seed(2))
    found = []
    windows = [3, window]  # of two layers
    for attend in (CausalAttend(length, windows), TrainingAttend(length, windows)):
        out = attend(1, *qkv)
        found.append([out, *torch.autograd.grad((out * weight).sum(), qkv)])
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n_tokens", [1, 37])
@pytest.mark.parametrize("n_words", [6, 20_000])
def test_cross_entropy_and_its_gradient_equal_those_of_torch(n_tokens: int, n_words: int) -> None:
    (logits,) = _heads((n_tokens, n_words))
    targets = torch.arange(n_tokens) * 5 % n_words
    targets[1::3] = IGNORE_INDEX
    plain = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE_INDEX) * 0.25
    used_up = logits * 1.0
    ours = cross_entropy(used_up, targets, weight=0.25, ignore_index=IGNORE_INDEX)
    torch.testing.assert_close(ours, plain)
    gradients = [torch.autograd.grad(3 * loss, logits)[0] for loss in (ours, plain)]
    torch.testing.assert_close(*gradients)


def test_loss_of_a_nearly_impossible_target_is_finite() -> None:
    """Its score is 0 in float32; the loss must not be infinite, which would end the run."""
    logits = torch.tensor([[0.0, 200.0, -50.0], [0.0, 0.0, 0.0]])
    loss = cross_entropy(logits, torch.tensor([2, 1]), weight=1.0, ignore_index=IGNORE_INDEX)
    assert float(loss) == pytest.approx(250.0 + math.log(3))
