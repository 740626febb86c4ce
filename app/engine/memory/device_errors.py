"""Classifies errors of a step: device lost, out of device memory, or neither.

Some CUDA errors are sticky: after an illegal address, a failed assertion in a kernel or a memory error, every later
call of the process fails, too. No request is at fault then, and requests can continue only in another process. Errors
of torch and Triton are recognized by their names, codes and first lines; codes and texts come from NVIDIA's
cudaError_t, in the order of c10/cuda/CUDAException.cpp in torch.
"""

from __future__ import annotations

from collections.abc import Iterator

_PREFIXES = ("CUDA error: ", "Triton Error [CUDA]: ")
_NO_MEMORY_CODE = 2
_HARMLESS_CODES = frozenset({1, _NO_MEMORY_CODE, 9, 98, 209, 218, 222, 701, 720, 801, *range(900, 912)})
"""Refused before any work ran (arguments, launch sizes, captures). Every other code counts as sticky."""
_CAPTURE_CODES = frozenset(range(900, 909))
_CODES = {
    "invalid argument": 1,
    "out of memory": _NO_MEMORY_CODE,
    "invalid configuration argument": 9,
    "invalid device function": 98,
    "no kernel image is available for execution on the device": 209,
    "too many resources requested for launch": 701,
    "operation not supported": 801,
    "operation not permitted when stream is capturing": 900,
    "operation failed due to a previous error during capture": 901,
}
"""Codes of Triton's errors, which have only a text."""
_LIBRARY_PREFIXES = ("CUBLAS_STATUS_", "CUSOLVER_STATUS_", "CUSPARSE_STATUS_", "CUDNN_STATUS_")
"""NVIDIA's libraries fail for either reason: freeing memory before the next attempt (memory_plan.py) shows which."""
_MAX_CHARACTERS = 120


def lost_device(error: BaseException) -> str | None:
    """CUDA's message if no later call in this process can succeed; None for every other error."""
    message = _cuda_message(error)
    if message is None or message.startswith(_LIBRARY_PREFIXES):
        return None
    return None if _code(error, message) in _HARMLESS_CODES else message


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or the device ran out of memory."""
    return isinstance(error, MemoryError) or _is_out_of_device_memory(error)


def lacked_device_memory(error: BaseException) -> bool:
    """Whether a lack of device memory caused the error.

    The memory error may be the cause of another one: a capture that it interrupts ends with its own error.
    """
    return any(_is_out_of_device_memory(cause) for cause in _error_chain(error))


def broken_capture(error: BaseException) -> str | None:
    """CUDA's message if the error, or one of its causes, ended a capture of steps; None for every other error.

    It may be the only sign of a lack of memory: torch's allocator tries to free memory before it raises its own error,
    which no capture survives (pytorch issue 159594).
    """
    causes = [*_error_chain(error)]
    if any(lost_device(cause) for cause in causes):
        return None
    messages = ((cause, _cuda_message(cause)) for cause in causes)
    return next((message for cause, message in messages if message and _code(cause, message) in _CAPTURE_CODES), None)


def _code(error: BaseException, message: str) -> int | None:
    code = getattr(error, "error_code", None)
    return code if isinstance(code, int) else _CODES.get(message)


def _error_chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its chain of causes."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _is_out_of_device_memory(error: BaseException) -> bool:
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which this file does not import
        return True
    message = _cuda_message(error)
    if message is None:
        return False
    return _code(error, message) == _NO_MEMORY_CODE or message.startswith("CUBLAS_STATUS_ALLOC_FAILED")


def _cuda_message(error: BaseException) -> str | None:
    """First line of a CUDA error without its prefix: fixed words that never contain client data."""
    if not isinstance(error, RuntimeError):  # torch.AcceleratorError is one
        return None
    first = str(error).partition("\n")[0]
    prefix = next((prefix for prefix in _PREFIXES if first.startswith(prefix)), None)
    if prefix is None:
        return first[:_MAX_CHARACTERS] if type(error).__name__ == "AcceleratorError" else None
    return first.removeprefix(prefix)[:_MAX_CHARACTERS]
