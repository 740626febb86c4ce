"""One step: gradients for any micro-batch size and number of threads, clipping, averaged and best weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.nn.transformer import Decoder
from model.presets import preset, reshaped
from model.tokenizer.tokenizer import Tokenizer
from model.train.data.batch import Batch, batch_of_windows
from model.train.data.examples import Prompt
from model.train.data.sources import DataError
from model.train.loop import Loop
from model.train.sampling import GREEDY_SAMPLING, generate_samples
from model.train.step.distributed import ProcessGroup
from model.train.step.evaluation import bits_per_byte
from model.train.step.objective import Objective
from model.train.step.optimizer import ParameterUpdates
from model.train.step.trainer import BestWeights, Trainer, WeightAverage, copy_tensors
from tests.support.model.tiny_models import TEXT, tiny_decoder
from tests.support.model.training_runs import EXACT, TINY, state_of, train, weights_of

BATCH = batch_of_windows(torch.randint(300, (6, 17), generator=torch.Generator().manual_seed(1)))


def _trainer(micro_windows: int | None) -> Trainer:
    decoder = tiny_decoder().requires_grad_(True)
    objective = Objective(decoder, torch.device("cpu"), torch.float32)
    optimiser = ParameterUpdates(decoder, "adamw", matrix_lr=0.02, other_lr=0.001, weight_decay=0.0)
    return Trainer(objective, optimiser, ema=0.0, ranks=ProcessGroup(), micro_windows=micro_windows)


def _gradient(learner: Trainer) -> Tensor:
    learner.gradients(BATCH)
    assert learner.decoder.embedding.grad is not None
    return learner.decoder.embedding.grad


def _memory_for(rows: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stands in for a device with limited memory; records what was tried."""
    tried, loss_sum = [], Objective.loss_sum

    def within_memory(objective: Objective, batch: Batch, *scale: float) -> Tensor:
        tried.append(len(batch.inputs_RN))
        if tried[-1] > rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss_sum(objective, batch, *scale)

    monkeypatch.setattr(Objective, "loss_sum", within_memory)
    return tried


def test_micro_batch_size_affects_only_rounding() -> None:
    whole = _gradient(_trainer(6))
    for rows in (1, 2, 4):
        assert torch.allclose(_gradient(_trainer(rows)), whole, atol=1e-6)


@pytest.mark.parametrize("name", ["nano", "gpt"])
def test_threads_compute_what_one_does_with_reproducible_bits(name: str) -> None:
    n_threads_before = torch.get_num_threads()
    config = reshaped(preset(name), n_layers=1, width=64, n_heads=2)
    batch = batch_of_windows(torch.randint(0, config.vocab_size, (4, 17), generator=torch.Generator().manual_seed(4)))
    found = []
    for n_threads, dtype in ((1, torch.float32), (2, torch.float32), (2, torch.bfloat16), (2, torch.bfloat16)):
        torch.set_num_threads(n_threads)
        decoder = Decoder(config).initialize(3)
        optimiser = ParameterUpdates(decoder, "muon", matrix_lr=0.02, other_lr=0.004, weight_decay=0.05)
        objective = Objective(decoder, torch.device("cpu"), dtype)
        Trainer(objective, optimiser, ema=0.0, ranks=ProcessGroup(), micro_windows=1).gradients(batch)
        found.append([p.grad for p in decoder.parameters()])
    torch.set_num_threads(n_threads_before)
    for one, two, narrow, again in zip(*found, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)
        assert torch.equal(narrow, again)


class _ThreadsOfLargeOperations(TorchDispatchMode):
    """Records torch's thread count at each operation of this thread on tensors that torch would divide."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        if any(tensor.numel() >= 2**15 for tensor in tensors):  # at::internal::GRAIN_SIZE
            self.found.add(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("two_threads")
def test_no_operation_of_training_uses_torchs_threads() -> None:
    """Under other load, each such operation would wait for a time slice, with spinning threads."""
    decoder = Decoder(reshaped(preset("nano"), n_layers=1)).initialize(3)
    batch = batch_of_windows(torch.randint(0, 1024, (4, 65), generator=torch.Generator().manual_seed(4)))
    optimiser = ParameterUpdates(decoder, "muon", matrix_lr=0.02, other_lr=0.004, weight_decay=0.05)
    objective = Objective(decoder, torch.device("cpu"), torch.float32)
    trainer = Trainer(objective, optimiser, ema=0.0, ranks=ProcessGroup(), micro_windows=1)
    with _ThreadsOfLargeOperations() as control:
        decoder.embedding.detach().clone()
    with _ThreadsOfLargeOperations() as mode:
        trainer.gradients(batch)
        trainer.update(0, 1.0)
        bits_per_byte(objective, batch.split(2), [b"x"] * 1024)
        tokenizer = Tokenizer.train([TEXT], 300, fewer=True)
        generate_samples(decoder, tokenizer, [Prompt(text="a", tokens=[1])], 2, GREEDY_SAMPLING)
    assert (control.found, mode.found) == ({2}, {1})


@pytest.mark.parametrize("micro_windows", [None, 2])
def test_step_reads_one_value_from_its_device(micro_windows: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of the meta device has no value to read, so anything that waits for one fails."""
    pinned, read = list[Tensor](), list[Tensor]()
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)  # type: ignore[func-returns-value]
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: read.append(tensor) or [1.0, 1.0])  # type: ignore[func-returns-value]
    adamw = torch.optim.AdamW
    # The fused optimizer does not support the meta device.
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, fused, **more: adamw(groups, foreach=fused, **more))
    device = torch.device("meta")
    decoder = tiny_decoder().requires_grad_(True).to(device)
    optimizer = ParameterUpdates(decoder, "muon", matrix_lr=0.02, other_lr=0.001, weight_decay=0.0)
    objective = Objective(decoder, device, torch.float32)
    trainer = Trainer(objective, optimizer, ema=0.9, ranks=ProcessGroup(), micro_windows=micro_windows)
    for step in range(2):
        read.clear()
        pinned.clear()
        assert trainer.gradients(BATCH) == (1.0, 1.0)
        trainer.update(step, 1.0)
        assert [tensor.shape for tensor in read] == [(2,)]
        assert len(pinned) == 2 * (1 if micro_windows is None else 3), "inputs and targets of each micro-batch"


def test_clipping_equals_torchs_own() -> None:
    for scale in (0.001, 100.0):
        ours, plain = _trainer(None), _trainer(None)
        for learner in (ours, plain):
            for i, p in enumerate(learner.decoder.parameters()):
                p.grad = scale * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
        norm = torch.nn.utils.clip_grad_norm_(plain.decoder.parameters(), 1.0)
        assert torch.allclose(ours.optimizer.clip(), norm)
        for one, two in zip(ours.decoder.parameters(), plain.decoder.parameters(), strict=True):
            assert one.grad is not None and two.grad is not None and torch.allclose(one.grad, two.grad)


def test_micro_batch_is_halved_if_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _gradient(_trainer(2))
    learner = _trainer(None)
    tried = _memory_for(2, monkeypatch)
    assert torch.equal(_gradient(learner), expected)
    assert tried == [6, 3, 2, 2, 2] and learner.micro_windows == 2
    tried.clear()
    learner.gradients(BATCH)
    assert tried == [2, 2, 2]


def test_explicit_micro_batch_beyond_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _memory_for(2, monkeypatch)
    with pytest.raises(DataError, match="4 windows at once do not fit"):
        _trainer(4).gradients(BATCH)
    _memory_for(0, monkeypatch)
    with pytest.raises(DataError, match="lower --micro-windows or --context"):
        _trainer(None).gradients(BATCH)


def test_snapshot_restores_the_micro_batch_unless_a_flag_sets_it() -> None:
    for flag, kept, then in ((None, "4", 4), (None, "auto", None), (2, "4", 2)):
        learner = _trainer(flag)
        learner.restore_micro_windows(kept)
        assert learner.micro_windows == then


def _filled(value: float) -> torch.nn.Module:
    decoder = tiny_decoder()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.fill_(value)
    return decoder


def test_weight_average_follows_its_formula() -> None:
    decoder = _filled(1.0)
    average = WeightAverage(decoder, 0.5)
    expected = 1.0
    for step, value in ((1, 2.0), (2, 4.0), (30, 8.0)):
        with torch.no_grad():
            decoder.embedding.fill_(value)
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * value
    assert torch.allclose(average.tensors["embedding"], torch.tensor(expected))
    assert average.tensors["embedding"].dtype == torch.float32


def test_best_weights_are_a_copy_of_the_first_best() -> None:
    decoder, best = _filled(1.0), BestWeights()
    best.keep_if_best(decoder, 5, 2.0)
    with torch.no_grad():
        decoder.embedding.fill_(7.0)
    best.keep_if_best(decoder, 10, 2.0)
    best.keep_if_best(decoder, 15, float("nan"))
    assert (best.step, best.bits) == (5, 2.0)
    copy_tensors(best.tensors, dict(decoder.named_parameters()))
    assert bool((decoder.embedding == 1.0).all())


@pytest.mark.slow
def test_best_weights_are_exported_if_the_run_got_worse(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "bits_per_byte", lambda loop, _: abs(loop.step - 4) + 1.0)
    flags = [*TINY, *EXACT, "--steps", "6", "--warm-up", "1"]
    assert train(text, tmp_path / "best", *flags) == 0
    assert train(text, tmp_path / "last", *flags, "--keep", "last") == 0
    _, state = state_of(tmp_path / "best")
    name = "model.embed_tokens.weight"
    best, last = weights_of(tmp_path / "best")[name], weights_of(tmp_path / "last")[name]
    assert torch.equal(best, state["best.embedding"]) and not torch.equal(best, last)
    assert torch.equal(last, state["decoder.embedding"])
    assert "after step 4 of 6, the fewest held-out bits" in (tmp_path / "best/README.md").read_text()
    assert "weights after the last step" in (tmp_path / "last/README.md").read_text()
