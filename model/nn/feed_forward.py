"""Feed-forward networks of a block: dense, and mixtures of experts.

Shape legend: T tokens of a step, D width, F hidden size, E experts of a layer, C experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.config import Activation, ModelConfig
from model.decoder_program import ACTIVATION_PARAMETERS
from model.nn.layers import FastModule, Linear, activate_hidden, row_invariant, row_invariant_product
from model.nn.packed_tensors import PackedTensors

LEAST_SUM = 1e-12
"""That weights are divided by."""


class FeedForward(FastModule):
    """Two layers with an activation in between; one matrix product computes gate and up."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        """width: hidden size."""
        super().__init__()
        self.gated = config.gated
        count = ACTIVATION_PARAMETERS.get(config.activation)
        self.activation = nn.Parameter(torch.empty(count)) if count else None
        self.name = config.activation
        self.up = Linear(width * (1 + config.gated), config.width, bias=config.mlp_bias)
        self.down = Linear(config.width, width, bias=config.mlp_bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        down_TD: Tensor = self.down(self.activated(self.up(x_TD)))
        return down_TD

    def activated(self, hidden_TX: Tensor) -> Tensor:
        """[T, F]: what `up` computed, activated."""
        return activate_hidden(self.name, hidden_TX, self.activation, gated=self.gated)


class Routes(NamedTuple):
    """The experts of each token."""

    ids_TC: Tensor
    """Ascending in each row."""
    weights_TC: Tensor
    """float32."""


class Router(FastModule):
    """Logits of the experts, in float32; never quantized."""

    def __init__(self, count: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))
        self.bias = nn.Parameter(torch.empty(count)) if bias else None

    def forward(self, x_TD: Tensor) -> Tensor:
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        with torch.autocast(x_TD.device.type, enabled=False):
            return row_invariant_product(x_TD.to(wide), self.weight.to(wide), bias)


_ByExpert = tuple[Tensor | tuple[Tensor, ...] | None, ...]
"""Matrices up and down and their biases, which have an expert's at its index."""


class PackedExperts(NamedTuple):
    """Packed matrices of experts; None for one whose numbers are stored."""

    up: PackedTensors | None
    down: PackedTensors | None


class RoutedExperts(FastModule):
    """Feed-forward networks with a router's weights; only those that a row has chosen are read."""

    def __init__(self, count: int, width: int, hidden: int, *, activation: Activation, gated: bool, bias: bool) -> None:
        super().__init__()
        rows = hidden * (1 + gated)
        self.up = nn.Parameter(torch.empty(count, rows, width))
        self.down = nn.Parameter(torch.empty(count, width, hidden))
        self.up_bias = nn.Parameter(torch.empty(count, rows)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(count, width)) if bias else None
        self.name, self.gated = activation, gated
        self.packed: PackedExperts | None = None
        """In place of the parameters, if a GPU's kernels compute the experts; torch does not."""

    def forward(self, x_TD: Tensor, routes: Routes) -> Tensor:
        """Sum of each row's experts times their weights, in float32, in the order of their ids.

        Rows beyond those of `routes` have no experts.
        """
        assert self.packed is None, "only a GPU's kernels multiply with packed experts"
        n_chosen = routes.ids_TC.shape[1]
        ids, weights = routes.ids_TC.flatten(), routes.weights_TC.flatten()
        counts = ids.bincount(minlength=len(self.up)).tolist()
        by_expert = self._by_expert()
        total_TD = x_TD.new_zeros(x_TD.shape, dtype=routes.weights_TC.dtype)
        for expert, places in enumerate(ids.argsort(stable=True).split(counts)):
            if len(places):
                rows = places // n_chosen
                out = self._of_one(expert, x_TD[rows], by_expert).to(total_TD.dtype)
                total_TD.index_add_(0, rows, out * weights[places, None])
        return total_TD.to(x_TD.dtype)

    def _by_expert(self) -> _ByExpert:
        parameters = (self.up, self.down, self.up_bias, self.down_bias)
        if not torch.is_grad_enabled():
            return parameters
        # For each index, autograd would make a gradient of all experts.
        return tuple(None if parameter is None else parameter.unbind() for parameter in parameters)

    def _of_one(self, expert: int, x_RD: Tensor, by_expert: _ByExpert) -> Tensor:
        """[R, D]: the feed-forward of one expert."""
        up, down, up_bias, down_bias = (None if each is None else each[expert] for each in by_expert)
        assert up is not None and down is not None
        hidden_RX = row_invariant_product(x_RD, up, up_bias)
        activated_RF = activate_hidden(self.name, hidden_RX, gated=self.gated)
        return row_invariant_product(activated_RF, down, down_bias)


class MixtureOfExperts(FastModule):
    """Experts with their router, and the shared expert, which every token passes, if there is one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.experts
        self.config = experts = config.experts
        self.router = Router(experts.count, config.width, bias=experts.router_bias)
        self.choice_bias = nn.Parameter(torch.empty(experts.count)) if experts.choice_bias else None
        self.experts = RoutedExperts(
            experts.count,
            config.width,
            experts.width,
            activation=config.activation,
            gated=config.gated,
            bias=experts.bias,
        )
        self.shared = FeedForward(config, experts.shared_width) if experts.shared_width else None

    def branches(self) -> list[Callable[[Tensor], Tensor]]:
        """Functions [T, D] -> [T, D] that add to the residual stream, in this order."""
        return [lambda x_TD: self.experts(x_TD, self.route(x_TD)), *([self.shared] if self.shared else [])]

    def route(self, x_TD: Tensor) -> Routes:
        """The experts of each row and their weights, which depend on that row only."""
        logits_TE = self.router(x_TD)
        match self.config.score:
            case "softmax":
                scores_TE = logits_TE.softmax(-1)
            case "sigmoid":
                scores_TE = row_invariant(torch.sigmoid, logits_TE)
            case "softmax_of_chosen":
                scores_TE = logits_TE
        ranked_TE = scores_TE if self.choice_bias is None else scores_TE + self.choice_bias.to(scores_TE.dtype)
        order_TE = ranked_TE.sort(dim=-1, descending=True, stable=True).indices
        ids_TC = order_TE[:, : self.config.chosen].sort(dim=-1).values
        weights_TC = scores_TE.gather(1, ids_TC)
        if self.config.score == "softmax_of_chosen":
            weights_TC = weights_TC.softmax(-1)
        if self.config.normalized:
            weights_TC = weights_TC / weights_TC.sum(-1, keepdim=True).clamp(min=LEAST_SUM)
        return Routes(ids_TC, weights_TC if self.config.factor == 1.0 else weights_TC * self.config.factor)
