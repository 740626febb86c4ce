"""Who updates which parameter. Knows no schedule, no data and no files.

Each parameter has an optimiser of its own, which a CPU runs on one thread, several at a time. So the numbers do not
depend on how many threads there are, and threads meet once an update, not behind each product of a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from model.nn.transformer import Decoder
from model.train.common.flag_types import Optimizer
from model.train.common.thread_pool import one_by_one


class ParameterUpdates:
    """muon: Muon for the matrices of the blocks, AdamW for embeddings and norms. adamw: AdamW for everything.

    One learning-rate schedule over both; only the matrices of the blocks decay. Source of Muon: Jordan et al. 2024;
    Newton-Schulz orthogonalised momentum as in torch.optim.Muon.
    """

    def __init__(
        self, decoder: Decoder, kind: Optimizer, *, matrix_lr: float, other_lr: float, weight_decay: float
    ) -> None:
        blocks = (decoder.blocks, decoder.encoder_blocks)
        matrices = [p for part in blocks for p in part.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in decoder.parameters() if id(p) not in chosen]
        self.parts: dict[str, list[torch.optim.Optimizer]] = {"muon": [], "adamw": [_adamw(p, 0.0) for p in others]}
        if kind == "muon":
            self.parts["muon"] += [torch.optim.Muon([p], weight_decay=weight_decay, momentum=0.95) for p in matrices]
        else:
            self.parts["adamw"] += [_adamw(p, weight_decay) for p in matrices]
        self._base_lr = {"muon": matrix_lr, "adamw": other_lr}
        self._parameters = list(decoder.parameters())

    def clip(self) -> float:
        """Scales the gradients down to norm 1. Returns the norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self._parameters, 1.0))

    def step(self, lr_factor: float) -> None:
        """Updates the parameters and clears the gradients."""
        for name, parts in self.parts.items():
            for part in parts:
                part.param_groups[0]["lr"] = self._base_lr[name] * lr_factor
        in_order = sorted((part for parts in self.parts.values() for part in parts), key=_size, reverse=True)
        if self._parameters[0].is_cpu:
            one_by_one(_step, in_order)  # the largest first: the last ones to end are small
        else:
            for part in in_order:
                _step(part)

    def tensors(self) -> dict[str, Tensor]:
        """All state as flat names: part.parameter.key."""
        return {
            f"{name}.{index}.{key}": value
            for name, parts in self.parts.items()
            for index, part in enumerate(parts)
            for key, value in part.state_dict()["state"].get(0, {}).items()
            if isinstance(value, Tensor)
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of tensors()."""
        states: dict[str, dict[str, Tensor]] = {}
        for flat, value in tensors.items():
            owner, _, key = flat.rpartition(".")
            states.setdefault(owner, {})[key] = value
        for name, parts in self.parts.items():
            for index, part in enumerate(parts):
                owner = f"{name}.{index}"
                state = {0: states[owner]} if owner in states else {}
                part.load_state_dict({"state": state, "param_groups": part.state_dict()["param_groups"]})


def _adamw(parameter: Tensor, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter], betas=(0.9, 0.95), weight_decay=weight_decay, fused=True)


def _step(part: torch.optim.Optimizer) -> None:
    part.step()
    part.zero_grad(set_to_none=True)


def _size(part: torch.optim.Optimizer) -> int:
    parameter: Tensor = part.param_groups[0]["params"][0]
    return parameter.numel()
