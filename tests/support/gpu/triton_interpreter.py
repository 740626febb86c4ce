"""Patches for Triton's interpreter, where its behavior differs from a GPU's in ways that matter to tests.

The interpreter multiplies by numpy, whose library takes another formula for some rows of a matrix than for others (64
by 32 by 64 in float32: of rows moved to other indexes 16 numbers in 100 differed). A GPU's matrix unit has one formula;
numpy's several would hide whether a kernel is batch invariant. Here products are added one after another.

Functions that kernels call are given the interpreter's language at each call, though the kernel has it already: most of
a small kernel's time. Here each file is given it once. And numpy 2.4 makes no integer of an array of one number, which
the interpreter of Triton 3.6 has for every bound of a loop.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import numpy as np


def repair() -> None:
    """Where kernels are interpreted at all; call it as often as you like."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreter = import_module("triton.runtime.interpreter")
        handle = interpreter.TensorHandle

        def create_dot(_builder: object, a: Any, b: Any, d: Any, _precision: object, _most: object) -> Any:
            assert a.data.dtype != np.uint16, "bfloat16 lies there as integers"
            wide_a, wide_b = (x.data.astype(d.data.dtype) for x in (a, b))
            products = wide_a[:, :, None] * wide_b[None]
            return handle(d.data + np.add.reduce(products, axis=1), d.dtype.scalar)

        interpreter.InterpreterBuilder.create_dot = create_dot
        if not getattr(interpreter.InterpretedFunction.__call__, "is_mended", False):
            _mend_calls(interpreter)


def _mend_calls(interpreter: Any) -> None:
    given: set[int] = set()
    call, patch_tensor = interpreter.InterpretedFunction.__call__, interpreter._patch_lang_tensor

    def call_once(self: Any, *args: Any, **options: Any) -> Any:
        names = self.fn.__globals__
        # Files that know the language as `tl` alone are covered by the kernel's own patch.
        if id(names) in given or "core" not in names:
            return self.rewrite()(*args, **options)
        given.add(id(names))
        return call(self, *args, **options)

    def patch_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    call_once.is_mended = True  # type: ignore[attr-defined]
    interpreter.InterpretedFunction.__call__ = call_once
    interpreter._patch_lang_tensor = patch_index
