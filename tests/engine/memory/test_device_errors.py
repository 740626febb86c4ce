"""Classification of CUDA errors by torch's types and messages, and how the engine reacts."""

from __future__ import annotations

import logging
import weakref
from array import array
from collections.abc import Iterator

import pytest
import torch

from app.common.types import Request
from app.engine.execution.fault_isolation import FaultIsolation
from app.engine.memory.device_errors import broken_capture, is_out_of_memory, lacked_device_memory, lost_device
from app.engine.scheduling.batch_plan import BatchPlan, Chunk, Sequence, StepResult

HELP = "\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
STAYING = {
    214: "uncorrectable ECC error encountered",
    700: "an illegal memory access was encountered",
    717: "operation not supported on global/shared address space",
    12345: "something new",
}
PASSING = {
    1: "invalid argument",
    2: "out of memory",
    9: "invalid configuration argument",
    701: "too many resources requested for launch",
    801: "operation not supported",
    900: "operation not permitted when stream is capturing",
}


def accelerator_error(code: int, words: str) -> torch.AcceleratorError:
    """An error as torch raises it from C++."""
    error = torch.AcceleratorError(f"CUDA error: {words}{HELP}")
    error.error_code = code
    return error


def _errors(code: int, words: str) -> list[RuntimeError]:
    """The same error as raised by torch, by older torch, and by Triton."""
    older, triton = RuntimeError(f"CUDA error: {words}{HELP}"), RuntimeError(f"Triton Error [CUDA]: {words}")
    return [accelerator_error(code, words), older, triton]


@pytest.mark.parametrize("code", [*STAYING, *PASSING])
def test_fatal_device_error_is_recognized_by_its_first_line(code: int) -> None:
    """An error that was found before anything ran does not lose the device."""
    for error in _errors(code, (STAYING | PASSING)[code]):
        assert lost_device(error) == STAYING.get(code) and is_out_of_memory(error) == (code == 2)


def test_cause_of_an_error_is_found_in_its_chain() -> None:
    missing, ended = (
        torch.OutOfMemoryError("CUDA out of memory."),
        "operation failed due to a previous error during capture",
    )
    for error in _errors(901, ended):
        assert broken_capture(error) == ended and not lacked_device_memory(error)
        error.__context__ = missing
        assert lacked_device_memory(error) and not is_out_of_memory(error)
        later = ValueError("said of it")
        later.__cause__ = error
        assert broken_capture(later) == ended and lacked_device_memory(later)
        missing.__context__ = accelerator_error(700, STAYING[700])
        assert not broken_capture(error), "a lost device must not count as missing memory"
        missing.__context__ = None
    others = [missing, MemoryError(), accelerator_error(700, STAYING[700]), RuntimeError("during capture")]
    assert not any(broken_capture(error) for error in others)
    assert not lacked_device_memory(MemoryError()), "the host's memory, not the device's"


def test_errors_of_memory_or_requests_do_not_lose_the_device() -> None:
    missing = [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."),
        MemoryError(),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ]
    assert all(is_out_of_memory(error) and lost_device(error) is None for error in missing)
    others = [
        RuntimeError("shape '[2, 3]' is invalid for input of size 5"),
        ValueError("CUDA error: device-side assert triggered"),
        RuntimeError("a prompt that quotes CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
    ]
    assert not any(is_out_of_memory(error) or lost_device(error) for error in others)


class Raises:
    """A runner whose steps raise one error after the other and then succeed."""

    def __init__(self, *errors: BaseException) -> None:
        self.steps: list[int] = []
        self._errors: Iterator[BaseException] = iter(errors)

    def run(self, plan: BatchPlan) -> StepResult:
        self.steps.append(len(plan.chunks))
        if error := next(self._errors, None):
            raise error
        return StepResult()


def _plan(rows: int) -> BatchPlan:
    requests = [Request(id=str(row), prompt=(1,), max_tokens=1) for row in range(rows)]
    return BatchPlan(tuple(Chunk(Sequence(request=r, tokens=array("q", [1]), arrival=0), 0, 1) for r in requests))


def test_lost_device_ends_the_engine_at_once_and_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    for error in _errors(700, STAYING[700]):
        caplog.clear()
        runner = Raises(error)
        with pytest.raises(RuntimeError) as caught:
            FaultIsolation(runner, release=lambda: pytest.fail("there is nothing to give back")).run(_plan(3))
        assert (caught.value, runner.steps) == (error, [3])
        assert [record.getMessage() for record in caplog.records] == [f"the device is lost: {STAYING[700]}"]
    runner = Raises(RuntimeError("a row"), accelerator_error(700, STAYING[700]))
    with pytest.raises(torch.AcceleratorError):
        FaultIsolation(runner).run(_plan(3))
    assert runner.steps == [3, 1], "also after retrying rows alone"


def test_out_of_memory_fails_only_its_row_and_memory_is_freed_before_retries() -> None:
    lacking = torch.OutOfMemoryError("CUDA out of memory.")
    runner = Raises(lacking, accelerator_error(2, PASSING[2]))
    released: list[int] = []
    result = FaultIsolation(runner, release=lambda: released.append(len(runner.steps))).run(_plan(3))
    assert [*result.failed] == ["0"] and "memory" in result.failed["0"]
    assert runner.steps == [3, 1, 1, 1, 1], "the last one shows that the device still works"
    assert released == [1, 2]


def test_device_error_during_the_release_of_memory_ends_the_engine() -> None:
    """An NVIDIA library only reports that it failed; synchronizing with the device yields the reason."""
    lost = accelerator_error(700, STAYING[700])

    def release() -> None:
        raise lost

    runner = Raises(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"))
    with pytest.raises(torch.AcceleratorError) as caught:
        FaultIsolation(runner, release=release).run(_plan(2))
    assert caught.value is lost and runner.steps == [2]


def test_isolated_step_is_logged_with_type_and_location_but_no_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The message may quote client data."""
    assert FaultIsolation(Raises(RuntimeError("a canary from a prompt"))).run(_plan(1)) == StepResult()
    place = "RuntimeError < tests/engine/memory/test_device_errors.py:"
    assert place in caplog.text and "canary" not in caplog.text


def test_tensors_of_a_failed_step_are_freed_before_memory_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the error's traceback may keep them alive: a runner's frames hold a step's tensors."""
    monkeypatch.setattr(logging.getLogger("inkstream"), "disabled", True)  # pytest keeps log records with their frames
    alive: list[weakref.ref[torch.Tensor]] = []
    seen: list[object] = []

    class Lacks:
        def run(self, plan: BatchPlan) -> StepResult:
            if len(seen) < 2:
                tensors = torch.zeros(1)
                alive.append(weakref.ref(tensors))
                raise torch.OutOfMemoryError(f"CUDA out of memory beside {tensors} for {plan}")
            return StepResult()

    FaultIsolation(Lacks(), release=lambda: seen.append(alive[-1]())).run(_plan(2))
    assert seen == [None, None]
