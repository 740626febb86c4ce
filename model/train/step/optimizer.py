"""Which optimizer updates which parameter, and in what order.

Each parameter has an optimizer of its own. A CPU runs each on one thread, several at a time: the numbers do not depend
on the number of threads, and threads synchronize once an update. A GPU updates all matrices of one shape together.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from model.nn.transformer import Decoder
from model.train.common.flag_types import Optimizer
from model.train.common.thread_pool import one_by_one
from model.train.step.muon import step_stacked


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
        muon = matrices if kind == "muon" else []
        self._muon = [torch.optim.Muon([p], weight_decay=weight_decay, momentum=0.95) for p in muon]
        self._adamw = [_adamw(p, 0.0) for p in others]
        self._adamw += [] if muon else [_adamw(p, weight_decay) for p in matrices]
        self.parts: dict[str, list[torch.optim.Optimizer]] = {"muon": [*self._muon], "adamw": self._adamw}
        self._base_lr = {"muon": matrix_lr, "adamw": other_lr}
        self._parameters = list(decoder.parameters())

    def clip(self) -> Tensor:
        """Scales the gradients down to norm 1. Returns the norm before, on the device: reading it would wait."""
        return torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)

    def step(self, lr_factor: float) -> None:
        """Updates the parameters and clears the gradients."""
        for name, parts in self.parts.items():
            for part in parts:
                part.param_groups[0]["lr"] = self._base_lr[name] * lr_factor
        if self._parameters[0].is_cpu:
            in_order = sorted([*self._muon, *self._adamw], key=_size, reverse=True)
            one_by_one(_step, in_order)  # the largest first: the last ones to end are small
            return
        step_stacked(self._muon)
        for adamw in self._adamw:
            _step(adamw)

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
