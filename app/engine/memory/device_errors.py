"""Classifies errors of a step: device lost, out of device memory, or neither.

Some CUDA errors are sticky: after an illegal address, a failed assertion in a kernel or a memory error, every later
call of the process fails, too. No request is at fault then, and requests can continue only in another process. Errors
of torch and Triton are recognized by their names, codes and first lines; codes and texts are those of NVIDIA's
cudaError_t, in the order of c10/cuda/CUDAException.cpp in torch.
"""

from __future__ import annotations

from collections.abc import Iterator

_PREFIXES = ("CUDA error: ", "Triton Error [CUDA]: ")
_NO_MEMORY_CODE = 2
_HARMLESS_CODES = frozenset({1, _NO_MEMORY_CODE, 9, 98, 209, 218, 222, 701, 720, 801, *range(900, 912)})
"""Refused before anything ran (arguments, launch sizes, captures). Any other is taken for one that stays."""
_CAPTURE_CODES = frozenset(range(900, 909))
_CAPTURE_WORDS = frozenset(
    {
        "operation not permitted when stream is capturing",
        "operation failed due to a previous error during capture",
    }
)
_HARMLESS_WORDS = _CAPTURE_WORDS | frozenset(
    {
        "invalid argument",
        "out of memory",
        "invalid configuration argument",
        "invalid device function",
        "no kernel image is available for execution on the device",
        "too many resources requested for launch",
        "operation not supported",
    }
)
"""The same errors where there is only a text: from Triton, and from torch before it had AcceleratorError."""
_LIBRARY_WORDS = ("CUBLAS_STATUS_", "CUSOLVER_STATUS_", "CUSPARSE_STATUS_", "CUDNN_STATUS_")
"""NVIDIA's libraries fail for either reason: freeing memory before the next attempt shows which (device_memory.py)."""
_MOST_CHARACTERS = 120


def lost_device(error: BaseException) -> str | None:
    """CUDA's own words where no call in this process can succeed any more; None for every other error."""
    words = _cuda_words(error)
    if words is None or words.startswith(_LIBRARY_WORDS):
        return None
    code = getattr(error, "error_code", None)
    is_harmless = code in _HARMLESS_CODES if isinstance(code, int) else words in _HARMLESS_WORDS
    return None if is_harmless else words


def is_out_of_memory(error: BaseException) -> bool:
    """Python's own or the device's."""
    return isinstance(error, MemoryError) or _is_out_of_device_memory(error)


def lacked_device_memory(error: BaseException) -> bool:
    """Whether it came of too little memory on the device.

    The error that says so may stand behind another one: a capture that it breaks off ends with an error of its own.
    """
    return any(_is_out_of_device_memory(reason) for reason in _reasons(error))


def broken_capture(error: BaseException) -> str | None:
    """CUDA's own words where an error is, or came of, one that ended a capture of steps; None for every other.

    That may be all that is told of memory that was missing: torch's allocator tries to free some before it says so,
    which no capture survives (pytorch issue 159594).
    """
    reasons = [*_reasons(error)]
    if any(lost_device(reason) for reason in reasons):
        return None
    return next((_cuda_words(reason) for reason in reasons if _breaks_a_capture(reason)), None)


def _breaks_a_capture(error: BaseException) -> bool:
    words, code = _cuda_words(error), getattr(error, "error_code", None)
    return words is not None and (code in _CAPTURE_CODES if isinstance(code, int) else words in _CAPTURE_WORDS)


def _reasons(error: BaseException) -> Iterator[BaseException]:
    """It, and what stands behind it."""
    reason: BaseException | None = error
    while reason is not None:
        yield reason
        reason = reason.__cause__ or reason.__context__


def _is_out_of_device_memory(error: BaseException) -> bool:
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which this file does not import
        return True
    words = _cuda_words(error)
    if words is None:
        return False
    has_code = getattr(error, "error_code", None) == _NO_MEMORY_CODE
    return has_code or words.startswith(("out of memory", "CUBLAS_STATUS_ALLOC_FAILED"))


def _cuda_words(error: BaseException) -> str | None:
    """The first line behind the prefix of an error of CUDA: fixed words, nothing that a client has sent."""
    if not isinstance(error, RuntimeError):  # torch.AcceleratorError is one
        return None
    first = str(error).partition("\n")[0]
    prefix = next((prefix for prefix in _PREFIXES if first.startswith(prefix)), None)
    if prefix is None:
        return first[:_MOST_CHARACTERS] if type(error).__name__ == "AcceleratorError" else None
    return first.removeprefix(prefix)[:_MOST_CHARACTERS]
