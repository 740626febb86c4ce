"""The training loss: how a device computes it, and cross-entropy with its gradient.

         | --compile off     | auto                      | on
    CPU  | gradients by hand | gradients by hand         | torch's own, compiled (C++)
    CUDA | torch's own       | compiled where Triton is  | compiled, or an error

Handwritten gradients save memory passes on a CPU; on a GPU they would be thousands of small kernels.
Shape legend: T tokens, V vocabulary, S tokens of a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from model.nn.attention import Attend, CausalAttend
from model.nn.reference import read_sources
from model.nn.transformer import Decoder
from model.train.data.batch import IGNORE_INDEX, Batch
from model.train.reporting.console import print_stderr
from model.train.step.attention import TrainingAttend

_SLICE_ELEMENTS = 2**18
"""Elements per slice: in float32 they fit into a core's own cache."""
_CHUNK_ELEMENTS = 2**26
"""Logits at a time where neither a compiler nor a handwritten gradient avoids float32 copies of all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBackend:
    """One way to compute the loss."""

    is_handwritten: bool = False
    """Whether to use the handwritten gradients of this package instead of autograd."""
    backend: str | None = None
    """Backend of torch.compile; None means not compiled."""
    may_fall_back: bool = False
    """Whether a compiler failure is only a warning."""


def choose_loss_backend(mode: str, device: str, *, has_encoder: bool = False) -> LossBackend:
    """The backend for --compile (auto | on | off) on a device (cpu | cuda). Raises ValueError.

    Models with an encoder are not compiled: their rows vary in length, and each length would be compiled separately.
    """
    is_compiled_by_default = device == "cuda" and not has_encoder and find_spec("triton") is not None
    if mode == "off" or (mode == "auto" and not is_compiled_by_default):
        return LossBackend(is_handwritten=device == "cpu")
    if has_encoder:
        raise ValueError("--compile on: a model with an encoder is not compiled; omit the flag")
    return LossBackend(backend="inductor", may_fall_back=mode == "auto")


def cross_entropy(logits_TV: Tensor, targets_T: Tensor, *, weight: float, ignore_index: int) -> Tensor:
    """Nats summed over the targets other than `ignore_index`, times `weight`.

    Overwrites the logits with their gradient, in their dtype. So the operation that computes the logits must not need
    them for its own backward; a matrix product does not.
    """
    loss: Tensor = _CrossEntropy.apply(logits_TV, targets_T, weight, ignore_index)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, weight: float, ignore_index: int) -> Tensor:
        ctx.gradient_TV = logits_TV.detach()
        size = max(1, _SLICE_ELEMENTS // logits_TV.shape[1])
        # Allocated once: new memory of this size costs more than the computation in it.
        scratch_SV, scores_SV = torch.empty(2, size, logits_TV.shape[1], device=logits_TV.device)
        losses = []
        for slice_SV, targets_S in zip(ctx.gradient_TV.split(size), targets_T.split(size), strict=True):
            n_rows = len(slice_SV)
            losses.append(
                _logits_to_gradient(slice_SV, targets_S, weight, ignore_index, scratch_SV[:n_rows], scores_SV[:n_rows])
            )
        return torch.stack(losses).sum() * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        gradient_TV: Tensor = ctx.gradient_TV
        return gradient_TV if grad.is_cpu and float(grad) == 1.0 else gradient_TV.mul_(grad), None, None, None


def _logits_to_gradient(
    slice_SV: Tensor, targets_S: Tensor, weight: float, ignore_index: int, scratch_SV: Tensor, scores_SV: Tensor
) -> Tensor:
    """Replaces logits with their gradient. Returns the sum of the losses."""
    counts_S1 = targets_S.ne(ignore_index)[:, None]
    targets_S1 = targets_S.clamp(min=0)[:, None]
    torch.softmax(scratch_SV.copy_(slice_SV), -1, out=scores_SV)
    # log softmax without another pass of exp, which costs more than softmax: uses the score of the largest logit.
    largest_S1, most_S1 = (x_SV.amax(-1, keepdim=True) for x_SV in (scratch_SV, scores_SV))
    losses_S1 = largest_S1 - scratch_SV.gather(1, targets_S1) - most_S1.log()
    loss = losses_S1.masked_fill(~counts_S1, 0.0).sum()
    scores_SV.scatter_add_(1, targets_S1, torch.full_like(targets_S1, -1, dtype=torch.float32))
    slice_SV.copy_(scores_SV.mul_(counts_S1 * weight))
    return loss


class Objective:
    """The decoder's loss on batches, computed in `dtype`."""

    def __init__(
        self, decoder: Decoder, device: torch.device, dtype: torch.dtype, loss_backend: LossBackend | None = None
    ) -> None:
        """loss_backend: by default the device's, not compiled."""
        self.decoder, self.device, self.dtype = decoder, device, dtype
        self.loss_backend = loss_backend or choose_loss_backend("off", device.type)
        backend = self.loss_backend.backend
        self._compiled = torch.compile(self._whole, backend=backend) if backend else None

    def loss_sum(self, batch: Batch, weight: float = 1.0) -> Tensor:
        """Nats summed over the targets that are not ignored, times `weight`."""
        batch = batch.to(self.device)
        targets_T = batch.targets_RN.flatten()
        if self.loss_backend.is_handwritten:
            logits_TV = self._head(self._hidden(batch, TrainingAttend))
            return cross_entropy(logits_TV, targets_T, weight=weight, ignore_index=IGNORE_INDEX)
        if self._compiled and batch.sources is None:
            return weight * self._compiled_or_plain(batch, targets_T)
        return weight * self._plain(batch, targets_T)

    @torch.no_grad()  # applies to one thread
    def nats(self, batch: Batch) -> float:
        """Nats summed over the targets that are not ignored, without gradients."""
        batch = batch.to(self.device)
        return float(self._plain(batch, batch.targets_RN.flatten()))

    def _plain(self, batch: Batch, targets_T: Tensor) -> Tensor:
        """Uses autograd; the logits of one chunk of tokens exist at a time, and are recomputed for their gradient."""
        size = max(1, _CHUNK_ELEMENTS // self.decoder.config.vocab_size)
        chunks = zip(self._hidden(batch, CausalAttend).split(size), targets_T.split(size), strict=True)
        losses = [
            checkpoint(self._head_loss, hidden_TD, part_T, use_reentrant=False, preserve_rng_state=False)
            for hidden_TD, part_T in chunks
        ]
        return torch.stack(losses).sum()

    def _whole(self, batch: Batch, targets_T: Tensor) -> Tensor:
        """For the compiler, which computes a loss and its gradient from logits in the compute dtype."""
        return self._head_loss(self._hidden(batch, CausalAttend), targets_T)

    def _head_loss(self, hidden_TD: Tensor, targets_T: Tensor) -> Tensor:
        logits_TV = self._head(hidden_TD).float()
        return F.cross_entropy(logits_TV, targets_T, reduction="sum", ignore_index=IGNORE_INDEX)

    def _compiled_or_plain(self, batch: Batch, targets_T: Tensor) -> Tensor:
        assert self._compiled is not None
        try:
            loss: Tensor = self._compiled(batch, targets_T)
            return loss
        except torch._dynamo.exc.TorchDynamoException as error:
            what = " ".join(str(error).splitlines()[:2])  # component and reason
            if not self.loss_backend.may_fall_back:
                raise ValueError(f"--compile on: torch's compiler failed ({what}); omit the flag") from None
            print_stderr(f"warning: torch's compiler failed ({what}); training continues without it")
            self._compiled = None
            return self._plain(batch, targets_T)

    def _hidden(self, batch: Batch, attend_for: Callable[[int, Sequence[int | None]], Attend]) -> Tensor:
        """Hidden states [T, D] of a batch that is on the device."""
        inputs_RN, sources, cross = batch.inputs_RN, batch.sources, None
        config, length = self.decoder.config, inputs_RN.shape[1]
        cap = config.attention_soft_cap
        is_special = cap is not None or config.sinks
        attend = CausalAttend(length, config.windows, cap) if is_special else attend_for(length, config.windows)
        positions_T = torch.arange(inputs_RN.shape[1], device=self.device).repeat(len(inputs_RN))
        with self._autocast():
            if sources:
                cross = read_sources(self.decoder, sources.tokens_RS, sources.real_RS)
            hidden_TD: Tensor = self.decoder(inputs_RN.flatten(), positions_T, attend, cross)
        return hidden_TD

    def _head(self, hidden_TD: Tensor) -> Tensor:
        """Logits [T, V]."""
        with self._autocast():
            return self.decoder.head(hidden_TD)

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, dtype=self.dtype)
