"""The compiled kernels as Python sees them: structures, functions, buffers of numbers. Knows no decoder and no build.

Every structure mirrors one of source/interface.h; ink_sizes() tells whether both sides mean the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_long, c_void_p
from pathlib import Path
from typing import Any

from app.engine.cpu.toolchain.cache_key import ABI


class Matrix(Structure):
    """InkMatrix."""

    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("scale", c_void_p),
        ("outputs", c_int32),
        ("steps", c_int32),
        ("is_int8", c_int32),
        ("unused", c_int32),
    )


class Operation(Structure):
    """InkOperation."""

    _fields_ = (
        ("kind", c_int32),
        ("source", c_int32),
        ("target", c_int32),
        ("flag", c_int32),
        ("layer", c_int32),
        ("columns", c_int32),
        ("gated", c_int32),
        ("eps", c_float),
        ("matrix", POINTER(Matrix)),
        ("weight", c_void_p),
        ("bias", c_void_p),
    )


class Shape(Structure):
    """InkShape."""

    _fields_ = (
        *((name, c_int32) for name in ("is_bf16", "n_registers", "query_heads", "kv_heads", "head_width", "window")),
        *((name, c_int32) for name in ("turned", "width", "n_operations", "n_blocks", "final_norm", "unused")),
        *((name, c_float) for name in ("attention_scale", "embedding_scale", "soft_cap", "eps")),
        ("angles", c_void_p),
        ("places", c_void_p),
        ("embedding", POINTER(Matrix)),
        ("head", POINTER(Matrix)),
        ("final_weight", c_void_p),
        ("final_bias", c_void_p),
        ("cache", c_void_p),
        ("register_columns", c_void_p),
        ("operations", c_void_p),
    )


class Step(Structure):
    """InkStep."""

    _fields_ = (
        ("n_rows", c_int32),
        ("n_chunks", c_int32),
        ("tokens", c_void_p),
        ("chunks", c_void_p),
        ("tables", c_void_p),
        ("seconds", c_void_p),
    )


Function = Callable[..., Any]
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "abi": (c_int, ()),
    "sizes": (c_int, ()),
    "open_pool": (c_void_p, (c_int, c_int)),
    "close_pool": (None, (c_void_p,)),
    "packed_bytes": (c_long, (c_int, c_int, c_int, c_int)),
    "pack": (None, (c_void_p, c_int, c_int, c_int, c_int, c_int, c_int, c_void_p)),
    "open": (c_void_p, (POINTER(Shape), c_void_p)),
    "close": (None, (c_void_p,)),
    "run": (None, (c_void_p, POINTER(Step))),
    "head": (None, (c_void_p, c_void_p, c_int, c_void_p, c_long)),
}


class LibraryError(ValueError):
    """The file is not the library that this code was written for."""


class Library:
    """The functions of one compiled file. Raises LibraryError."""

    abi: Function
    sizes: Function
    open_pool: Function
    close_pool: Function
    packed_bytes: Function
    pack: Function
    open: Function
    close: Function
    run: Function
    head: Function

    def __init__(self, path: Path) -> None:
        try:
            self.loaded = ctypes.CDLL(str(path))
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(self.loaded, f"ink_{name}")
                function.restype, function.argtypes = result, arguments
                setattr(self, name, function)
        except (OSError, AttributeError) as error:
            raise LibraryError(f"{path}: cannot be loaded ({error})") from None
        mine = sum(ctypes.sizeof(each) * 1000**i for i, each in enumerate((Matrix, Operation, Shape)))
        if (self.abi(), self.sizes()) != (ABI, mine):
            raise LibraryError(f"{path}: was built from other sources")
