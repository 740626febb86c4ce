"""Who updates which parameter. Knows no schedule, no data and no files."""

from __future__ import annotations

import torch
from torch import Tensor

from model.train.recipes import Optimizer
from model.transformer import Decoder


class Optimiser:
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
        self.parts: dict[str, torch.optim.Optimizer] = {}
        groups = [{"params": others, "weight_decay": 0.0}]
        if kind == "muon":
            self.parts["muon"] = torch.optim.Muon(matrices, lr=matrix_lr, weight_decay=weight_decay, momentum=0.95)
        else:
            groups.append({"params": matrices, "weight_decay": weight_decay})
        self.parts["adamw"] = torch.optim.AdamW(groups, lr=other_lr, betas=(0.9, 0.95))
        self._base_lr = {"muon": matrix_lr, "adamw": other_lr}
        self._parameters = list(decoder.parameters())

    def clip(self) -> float:
        """Scales the gradients down to norm 1. Returns the norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self._parameters, 1.0))

    def step(self, lr_factor: float) -> None:
        """Updates the parameters and clears the gradients."""
        for name, part in self.parts.items():
            for group in part.param_groups:
                group["lr"] = self._base_lr[name] * lr_factor
            part.step()
            part.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """All state as flat names: part.parameter.key."""
        return {
            f"{name}.{index}.{key}": value
            for name, part in self.parts.items()
            for index, state in part.state_dict()["state"].items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of tensors()."""
        for name, part in self.parts.items():
            state: dict[int, dict[str, Tensor]] = {}
            for flat, value in tensors.items():
                owner, _, rest = flat.partition(".")
                if owner == name:
                    index, _, key = rest.partition(".")
                    state.setdefault(int(index), {})[key] = value
            part.load_state_dict({"state": state, "param_groups": part.state_dict()["param_groups"]})
