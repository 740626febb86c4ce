"""Peak memory bandwidth and arithmetic of the machine on all threads, measured in the same rounds as the engines."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

_SIZES_MIB = (2, 4, 8, 16, 24, 32, 64, 256)
_MATRIX_SIZE = 1024
_REPEATS = 5
_READ_AT_LEAST = 64 << 20
_MIB = 1 << 20


def main() -> None:
    """Answers each line of standard input with all limits; speaks the adapters' protocol."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True)
    torch.set_num_threads(parser.parse_args().threads)
    pool = torch.ones(max(_SIZES_MIB) * _MIB // 4)
    _send({"ready": {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}})
    for _ in sys.stdin:
        _send({"read": {str(size * _MIB): read_speed(pool, size * _MIB) for size in _SIZES_MIB}, "multiply": speeds()})


def read_speed(pool: Tensor, size: int) -> float:
    """Bytes per second of the fastest of three operations that do little else than read; best of some repeats."""
    values = pool[: size // 4]
    matrix = values.view(-1, 1024)
    vector = torch.ones(1024)
    times = max(1, _READ_AT_LEAST // size)
    reads: list[Callable[[], Tensor]] = [values.sum, values.amax, lambda: torch.mv(matrix, vector)]
    return max(size * times / _best(read, times) for read in reads)


def speeds() -> dict[str, float]:
    """Operations per second of a large matrix product, by precision; the faster of torch and numpy in float32."""
    floats = torch.rand(_MATRIX_SIZE, _MATRIX_SIZE)
    array = floats.numpy()
    halves = floats.bfloat16()
    bytes_ = torch.randint(-9, 9, (_MATRIX_SIZE, _MATRIX_SIZE), dtype=torch.int8)
    operations = 2.0 * _MATRIX_SIZE**3
    return {
        "bf16": operations / _best(lambda: halves @ halves, 1),
        "f32": operations / min(_best(lambda: floats @ floats, 1), _best(lambda: array @ array, 1)),
        "int8": operations / _best(lambda: torch._int_mm(bytes_, bytes_), 1),
    }


def _best(call: Callable[[], object], times: int) -> float:
    """Seconds of `times` calls in a row; best of some repeats."""
    durations = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        for _ in range(times):
            call()
        durations.append(time.perf_counter() - started)
    return min(durations)


def _send(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
