"""Patches Triton's interpreter where its behavior differs from a GPU's in ways that matter to tests.

The interpreter multiplies with numpy, which uses another formula for some rows of a matrix than for others (64 by 32 by
64 in float32: 16 in 100 numbers of rows moved to other indexes differed). A GPU's matrix unit uses one formula; numpy's
several would hide whether a kernel is batch invariant. The patch adds products one after another.

The interpreter patches Triton's language into the file of a function at every call of the function, though its kernel
has it already: most of a small kernel's time. The patch does it once per file. And numpy 2.4 does not convert an array
of one number to an integer, which the interpreter of Triton 3.6 needs for every loop bound.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import numpy as np


def repair() -> None:
    """Patches the interpreter if kernels run in it; idempotent."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreter = import_module("triton.runtime.interpreter")
        handle = interpreter.TensorHandle

        def create_dot(_builder: object, a: Any, b: Any, d: Any, _precision: object, _most: object) -> Any:
            assert a.data.dtype != np.uint16, "the interpreter stores bfloat16 as integers"
            wide_a, wide_b = (x.data.astype(d.data.dtype) for x in (a, b))
            products = wide_a[:, :, None] * wide_b[None]
            return handle(d.data + np.add.reduce(products, axis=1), d.dtype.scalar)

        interpreter.InterpreterBuilder.create_dot = create_dot
        if not getattr(interpreter.InterpretedFunction.__call__, "is_patched", False):
            _patch_calls(interpreter)


def _patch_calls(interpreter: Any) -> None:
    patched: set[int] = set()
    call, patch_tensor = interpreter.InterpretedFunction.__call__, interpreter._patch_lang_tensor

    def call_once(self: Any, *args: Any, **options: Any) -> Any:
        names = self.fn.__globals__
        # The kernel's own patch covers files that import the language only as `tl`.
        if id(names) in patched or "core" not in names:
            return self.rewrite()(*args, **options)
        patched.add(id(names))
        return call(self, *args, **options)

    def patch_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    call_once.is_patched = True  # type: ignore[attr-defined]
    interpreter.InterpretedFunction.__call__ = call_once
    interpreter._patch_lang_tensor = patch_index
