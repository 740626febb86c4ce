"""Quantizes a GGUF file by llama.cpp: `python -m benchmarks.peers.adapters.quantize_gguf SOURCE q8_0|q4_k_m|q4_0 FILE`.

Rows whose length is no multiple of 256 do not fit llama.cpp's K-quants, and get a format of more bits.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import llama_cpp

_TYPES = {
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}


def main(source: Path, quantization: str, target: Path) -> None:
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = _TYPES[quantization]
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    if status:
        raise SystemExit(f"error: llama.cpp cannot quantize {source.name} to {quantization}, status {status}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
