"""Triton's interpreter, with a matrix product whose rows do not know where they stand. Knows no kernel.

The interpreter multiplies by numpy, whose library takes another formula for some rows of a matrix than for others (64
by 32 by 64 in float32: of rows moved to other places 16 numbers in 100 differed). A GPU's matrix unit has one, and with
numpy's nobody could see whether a kernel keeps the law of rows. Here products are added one after another.
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
