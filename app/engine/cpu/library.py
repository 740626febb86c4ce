"""ctypes binding of the compiled kernels: structures and functions.

Every structure mirrors one of source/interface.h; ink_sizes() verifies that their sizes agree.
"""

from __future__ import annotations

import ctypes
from ctypes import CDLL, POINTER, Structure, c_char_p, c_float, c_int, c_int8, c_int32, c_int64, c_long, c_void_p
from pathlib import Path
from typing import Any

from model.number_formats import Array


def address_of(array: Array) -> int:
    """Where the first number is."""
    address: int = array.__array_interface__["data"][0]
    return address


class Matrix(Structure):
    """Mirrors InkMatrix."""

    _fields_ = (
        *((name, c_void_p) for name in ("packed", "bias", "scale", "next", "have_sign")),
        *((name, c_int32) for name in ("outputs", "steps", "format", "group", "scales", "has_offsets")),
        ("table", c_int8 * 16),
    )


class Groups(Structure):
    """Mirrors InkGroups."""

    _fields_ = tuple((name, c_void_p) for name in ("codes", "scales", "offsets", "scale_units", "offset_units"))


class NativeOperation(Structure):
    """Mirrors InkOperation."""

    _fields_ = (
        *((name, c_int32) for name in ("kind", "source", "target", "flag", "layer", "columns")),
        *((name, c_int32) for name in ("gated", "window", "rotary_half")),
        *((name, c_float) for name in ("eps", "attention_scale", "attention_cap")),
        *((name, c_int32) for name in ("accumulates", "group")),
        ("matrix", POINTER(Matrix)),
        *((name, c_void_p) for name in ("weight", "bias", "rope_table", "query_scale")),
        *((name, c_int32) for name in ("norms_width", "norms_after")),
        ("down", POINTER(Matrix)),
        *((name, c_int32) for name in ("experts", "chosen", "score", "normalized")),
        ("expert_factor", c_float),
        ("unused", c_int32),
    )


class Cache(Structure):
    """Mirrors InkCache."""

    _fields_ = (("numbers", c_void_p), ("n_blocks", c_int64))


class Shape(Structure):
    """Mirrors InkShape."""

    _fields_ = (
        *((name, c_int32) for name in ("is_bf16", "n_registers", "query_heads", "kv_heads", "head_width", "width")),
        *((name, c_int32) for name in ("n_operations", "n_groups", "final_norm", "padded_head")),
        *((name, c_float) for name in ("embedding_scale", "logit_scale", "soft_cap", "eps")),
        ("has_coded_cache", c_int32),
        ("position_embeddings", c_void_p),
        *((name, POINTER(Matrix)) for name in ("embedding", "head")),
        *((name, c_void_p) for name in ("final_weight", "final_bias", "caches", "register_columns", "operations")),
    )


class Step(Structure):
    """Mirrors InkStep."""

    _fields_ = (
        *((name, c_int32) for name in ("n_rows", "n_chunks")),
        *((name, c_void_p) for name in ("tokens", "chunks", "seconds", "finite")),
    )


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ink_sizes": (c_int, ()),
    "ink_open_pool": (c_void_p, (c_int, c_int)),
    "ink_close_pool": (None, (c_void_p,)),
    "ink_format": (c_int, (c_char_p, c_int)),
    "ink_steps": (c_int, (c_int, c_int, c_int)),
    "ink_packed_bytes": (c_long, (c_int, c_int, c_int, c_int)),
    "ink_grouped_bytes": (c_long, (POINTER(Matrix), c_int)),
    "ink_pack_groups": (None, (c_void_p, POINTER(Groups), c_int, c_int, c_int, POINTER(Matrix))),
    "ink_pack": (None, (c_void_p, c_void_p, c_int, c_int, c_int, c_int, c_int, c_int, c_void_p)),
    "ink_open": (c_void_p, (POINTER(Shape), c_void_p)),
    "ink_close": (None, (c_void_p,)),
    "ink_run": (None, (c_void_p, POINTER(Step))),
    "ink_head": (None, (c_void_p, c_void_p, c_int, c_void_p, c_long)),
}
"""Result and arguments of each function; app/engine/cpu/sampler.py has the sampler's."""


class LibraryError(ValueError):
    """The file is not a library with the expected interface."""


def load_library(path: Path) -> CDLL:
    """Loads compiled kernels and checks their interface. Raises LibraryError."""
    try:
        library = CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise LibraryError(f"{path}: cannot be loaded ({error})") from None
    expected_sizes = sum(ctypes.sizeof(each) * 1000**i for i, each in enumerate((Matrix, NativeOperation, Shape)))
    if library.ink_sizes() != expected_sizes:
        raise LibraryError(f"{path}: has a different interface, because it was built from other sources")
    return library
