"""Pytest plug-in: an interrupted run ends at once, with all processes that its tests started.

Otherwise test processes stop their services one after another, and xdist waits for them. A process that a test started
has the id of the run in its environment, even where it has left the session and outlived its parent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

_RUN_ID = "PYTEST_XDIST_TESTRUNUID"


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Kills all other processes of the run, test processes included, from the process that the user started."""
    if exitstatus != pytest.ExitCode.INTERRUPTED or hasattr(session.config, "workerinput"):
        return
    run_id = ""
    if distributed := session.config.pluginmanager.getplugin("dsession"):
        run_id = distributed.nodemanager.testrunuid
        distributed.nodemanager.EXIT_TIMEOUT = 0.1
    deadline = time.monotonic() + 10
    while (left := list(_started(run_id))) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1)


def _started(run_id: str) -> Iterator[psutil.Process]:
    """Descendants of this process, and the other processes of the run."""
    yield from psutil.Process().children(recursive=True)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if run_id and process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_RUN_ID) == run_id:
                yield process
