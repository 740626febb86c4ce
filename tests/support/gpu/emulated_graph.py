"""A CUDA graph emulated without CUDA: records the operations of a step with their tensors, and replays them.

A replay runs no Python of the step: what the host decided or read while it was recorded stays as it was then. Reading
a number of the device while recording is an error, as it is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "item", "_unique2")
"""Operations that wait for the device: the host decides by their result, or a shape depends on it."""


class Watch(TorchDispatchMode):
    """Raises where something reads from the device. `replay` does what was seen once more."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        assert name not in READS, f"the host waits for the device in {name}"
        if name == "index":
            assert not any(t.dtype == torch.bool for t in tree_leaves(args[1]) if isinstance(t, Tensor)), (
                "a mask's shape"
            )
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        fresh = [t for t in made if t.untyped_storage().data_ptr() not in given]
        self._seen.append((func, args, kwargs or {}, fresh if len(fresh) == len(made) else []))
        return result

    def replay(self) -> None:
        """On the same tensors."""
        for func, args, kwargs, fresh in self._seen:
            again = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
            for old, new in zip(fresh, again, strict=False):
                old.copy_(new)


def record(work: Callable[[], None]) -> Callable[[], None]:
    """A `Capture` of app/engine/gpu/graphs.py."""
    with Watch() as watch:
        work()
    return watch.replay
