"""Optimizers of all parameters, and a Muon that updates all matrices of one shape together.

On a CPU each parameter has its own optimizer, and runs on one thread, several at a time: results do not depend on the
number of threads, and threads synchronize once per update. A GPU updates all matrices of one shape together with Muon,
and all other parameters with one fused AdamW.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.optim import Muon

from model.command_line import Optimizer
from model.nn.transformer import Decoder
from model.train.step.thread_pool import run_each

# torch.optim.Muon orthogonalizes one matrix after another: about 25 kernels each, 1,800 for ten layers, whose launches
# stall a GPU. Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks".
# Shape legend: M matrices of one shape, A rows, B columns.


@torch.no_grad()
def step_stacked(optimizers: Sequence[Muon]) -> None:
    """step() and zero_grad() of all optimizers, each of one matrix; settings other than `lr` must be equal.

    Uses torch's optimizer state. Results differ from torch's by rounding: a batched product sums in another order.
    """
    by_shape = defaultdict[torch.Size, list[Muon]](list)
    for optimizer in optimizers:
        by_shape[_matrix(optimizer).shape].append(optimizer)
    for group in by_shape.values():
        _step_group(group)


def orthogonalized(
    matrices_MAB: Tensor, *, coefficients: tuple[float, float, float], steps: int, epsilon: float
) -> Tensor:
    """[M, A, B] bfloat16: approximately U V^T of each matrix U S V^T, by quintic Newton-Schulz iterations."""
    a, b, c = coefficients
    is_tall = matrices_MAB.shape[1] > matrices_MAB.shape[2]
    x_MAB = matrices_MAB.bfloat16()
    x_MAB = x_MAB.mT.contiguous() if is_tall else x_MAB
    x_MAB = x_MAB / torch.linalg.vector_norm(x_MAB, dim=(1, 2), keepdim=True).clamp(min=epsilon)
    for _ in range(steps):
        gram_MAA = x_MAB @ x_MAB.mT
        x_MAB = torch.baddbmm(x_MAB, torch.baddbmm(gram_MAA, gram_MAA, gram_MAA, beta=b, alpha=c), x_MAB, beta=a)
    return x_MAB.mT if is_tall else x_MAB


def _step_group(optimizers: list[Muon]) -> None:
    """Updates matrices of one shape."""
    matrices, settings = [_matrix(optimizer) for optimizer in optimizers], optimizers[0].param_groups[0]
    gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
    buffers = [_momentum(optimizer) for optimizer in optimizers]
    torch._foreach_lerp_(buffers, gradients, 1 - settings["momentum"])
    updates = torch._foreach_lerp(gradients, buffers, settings["momentum"]) if settings["nesterov"] else buffers
    updates_MAB = orthogonalized(
        torch.stack(list(updates)),
        coefficients=settings["ns_coefficients"],
        steps=settings["ns_steps"],
        epsilon=settings["eps"],
    )
    rate = settings["lr"] * math.sqrt(max(1.0, updates_MAB.shape[1] / updates_MAB.shape[2]))
    torch._foreach_mul_(matrices, 1 - settings["lr"] * settings["weight_decay"])
    torch._foreach_add_(matrices, list(updates_MAB.to(matrices[0].dtype).unbind()), alpha=-rate)
    for matrix in matrices:
        matrix.grad = None


def _matrix(optimizer: Muon) -> Tensor:
    matrix: Tensor = optimizer.param_groups[0]["params"][0]
    return matrix


def _momentum(optimizer: Muon) -> Tensor:
    state = optimizer.state[_matrix(optimizer)]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(_matrix(optimizer))
    buffer: Tensor = state["momentum_buffer"]
    return buffer


_MAX_NORM, _NORM_EPSILON = 1.0, 1e-6


def block_matrices(decoder: Decoder) -> list[nn.Parameter]:
    """The matrices of the blocks, which Muon updates; experts have three dimensions, and their biases two."""
    blocks = (decoder.blocks, decoder.encoder_blocks)
    return [p for part in blocks for name, p in part.named_parameters() if p.ndim == 2 and not name.endswith("bias")]


class ParameterUpdates:
    """muon: Muon for the matrices of the blocks, AdamW for embeddings, norms, experts. adamw: AdamW for everything.

    Both share one learning-rate schedule; weight decay applies only to matrices of blocks and experts. Source of Muon:
    Jordan et al. 2024; Newton-Schulz orthogonalized momentum as in torch.optim.Muon.
    """

    def __init__(
        self, decoder: Decoder, kind: Optimizer, *, matrix_lr: float, other_lr: float, weight_decay: float
    ) -> None:
        matrices = block_matrices(decoder)
        chosen = {id(p) for p in matrices}
        others = [p for p in decoder.parameters() if id(p) not in chosen]
        muon = matrices if kind == "muon" else []
        self._muon = [torch.optim.Muon([p], weight_decay=weight_decay, momentum=0.95) for p in muon]
        self._parameters = list(decoder.parameters())
        decays = [(p, weight_decay if p.ndim == 3 else 0.0) for p in others] + [
            (p, weight_decay) for p in matrices if not muon
        ]
        together = [[pair] for pair in decays] if self._parameters[0].is_cpu else [decays]
        self._adamw = [_adamw(pairs) for pairs in together if pairs]
        self.parts: dict[str, list[torch.optim.Optimizer]] = {"muon": [*self._muon], "adamw": self._adamw}
        self._base_lr = {"muon": matrix_lr, "adamw": other_lr}

    def clip(self) -> Tensor:
        """Clips the gradients to norm 1. Returns the norm before clipping as a tensor: reading it synchronizes."""
        if not self._parameters[0].is_cpu:
            return torch.nn.utils.clip_grad_norm_(self._parameters, _MAX_NORM)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(run_each(torch.linalg.vector_norm, gradients)))
        factor = _MAX_NORM / (norm + _NORM_EPSILON)  # torch's formula
        if factor < 1.0:
            run_each(lambda gradient: gradient.mul_(factor), gradients)
        return norm

    def step(self, lr_factor: float) -> None:
        """Updates the parameters and clears the gradients."""
        for name, parts in self.parts.items():
            for group in (group for part in parts for group in part.param_groups):
                group["lr"] = self._base_lr[name] * lr_factor
        if self._parameters[0].is_cpu:
            in_order = sorted([*self._muon, *self._adamw], key=_size, reverse=True)
            run_each(_step, in_order)  # the largest first, so that threads finish at about the same time
            return
        step_stacked(self._muon)
        for adamw in self._adamw:
            _step(adamw)

    def tensors(self) -> dict[str, Tensor]:
        """All state, by flat names: optimizer.index of the parameter.key."""
        return {
            f"{name}.{index}.{key}": value
            for name, parts in self.parts.items()
            for index, (part, parameter) in enumerate(_parameters_of(parts))
            for key, value in part.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of tensors()."""
        states: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for flat, value in tensors.items():
            owner, _, key = flat.rpartition(".")
            states[owner][key] = value
        for name, parts in self.parts.items():
            first = 0
            for part in parts:
                owners = [f"{name}.{first + i}" for i in range(len(_parameters_of([part])))]
                state = {i: states[owner] for i, owner in enumerate(owners) if owner in states}
                part.load_state_dict({"state": state, "param_groups": part.state_dict()["param_groups"]})
                first += len(owners)


def _parameters_of(parts: Sequence[torch.optim.Optimizer]) -> list[tuple[torch.optim.Optimizer, Tensor]]:
    """Parameters in their order, each with its optimizer."""
    return [(part, p) for part in parts for group in part.param_groups for p in group["params"]]


def _adamw(decays: Sequence[tuple[Tensor, float]]) -> torch.optim.Optimizer:
    """AdamW of these parameters with their weight decays; equal weight decays must be adjacent."""
    groups = [
        {"params": [p for p, _ in pairs], "weight_decay": decay}
        for decay, pairs in groupby(decays, lambda pair: pair[1])
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def _step(part: torch.optim.Optimizer) -> None:
    part.step()
    part.zero_grad(set_to_none=True)


def _size(part: torch.optim.Optimizer) -> int:
    parameter: Tensor = part.param_groups[0]["params"][0]
    return parameter.numel()
