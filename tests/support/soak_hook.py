"""Sitecustomize of a soak test's service processes: reports their tasks, and leaks memory on demand.

SIGUSR1 writes the number of asyncio tasks of the API process into the file SOAK_TASKS; SIGUSR2 makes every request from
then on leak 64 KiB, a descriptor and a task. Nothing of it is in the service's own code.
"""

import asyncio
import contextlib
import gc
import os
import signal
import sys

_HOARD: list[object] = []


def _count_tasks(_number: int, _frame: object) -> None:
    with contextlib.suppress(RuntimeError):
        gc.collect()
        new = f"{os.environ['SOAK_TASKS']}.new"
        with open(new, "w") as file:  # noqa: PTH123 - what else is imported here is imported everywhere
            file.write(str(len(asyncio.all_tasks(asyncio.get_running_loop()))))
        os.replace(new, os.environ["SOAK_TASKS"])  # noqa: PTH105


def _leak(_number: int, _frame: object) -> None:
    service = sys.modules["app.serving.service"].Service
    real = service.begin

    async def begin(*arguments: object) -> object:
        admitted = await real(*arguments)
        _HOARD.append([bytearray(b"x" * 65536), open(os.devnull), asyncio.create_task(asyncio.sleep(1e6))])  # noqa: ASYNC230, PTH123, SIM115
        return admitted

    service.begin = begin


if "serve" in sys.argv or "serve" in getattr(sys, "orig_argv", []):
    signal.signal(signal.SIGUSR1, _count_tasks)
    signal.signal(signal.SIGUSR2, _leak)
