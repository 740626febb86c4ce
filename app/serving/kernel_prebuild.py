"""The API process's part in the native kernels: what there is when it starts, and a build for its next start.

It decides, and not the engine process, because an engine that comes back after a crash has to compute as the one before
did. A build runs in a process of its own, at idle priority, which ends with this process, also where that is killed:
app/engine/cpu/toolchain/guarded_subprocess.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from pathlib import Path

from app.common.settings import Settings
from app.engine.cpu.toolchain.backend_selection import TORCH, Libraries
from app.engine.cpu.toolchain.builder import compiler_commands, find
from app.engine.cpu.toolchain.cpu_target import BuildError
from app.engine.cpu.toolchain.guarded_subprocess import leashed
from app.engine_client.engine_pool import EnginePool

_log = logging.getLogger("inkstream")
_LIMIT_SECONDS = 6 * 3600.0
"""At idle priority on a busy machine a minute's work may take hours, and hurts nobody."""
_PATIENCE_SECONDS = 1.0
_ROOT = Path(__file__).parents[2]


def libraries_at_start(settings: Settings) -> Libraries:
    """The native kernels that are there now, if they are wanted at all."""
    found = None if settings.kernels == TORCH else find(settings.cache_dir)
    return Libraries(found=found, cache_dir=settings.cache_dir)


async def build_for_next_start(engine: EnginePool, cache_dir: Path | None) -> None:
    """Once the engine computes with torch for want of native kernels, builds them; never raises. Cancelling ends it."""
    ready = await engine.wait_ready()
    if not ready.waits_for_build:
        return
    try:
        compiler_commands(os.environ)
    except BuildError as error:
        _log.info("torch computes, native kernels would be faster: %s", error)
        return
    _log.info("native kernels are being built for the next start (a minute or so); until then torch computes")
    try:
        problem = await _compile(cache_dir)
    except OSError as error:
        problem = os.strerror(error.errno or 0)
    if problem:
        _log.warning("native kernels could not be built, torch computes: %s", problem)
    else:
        _log.info("native kernels are built: restart to use them")


async def _compile(cache_dir: Path | None) -> str:
    """Empty, or what went wrong."""
    # -P and our own path: a folder called app in the working directory is somebody else's.
    command = [sys.executable, "-P", "-m", "app", "compile", "--quiet", "--time-limit", str(_LIMIT_SECONDS)]
    where = ["--cache-dir", str(cache_dir)] if cache_dir else []
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = await asyncio.create_subprocess_exec(
        *leashed([*command, *where], idle=True),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdin and process.stderr
    try:
        told = (await process.stderr.read()).decode("utf-8", "replace").strip().splitlines()
        code = await process.wait()
    finally:
        process.stdin.close()  # the leash: whatever still runs ends, within moments or by force
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _PATIENCE_SECONDS)
    return (told[-1] if told else f"exit code {code}").removeprefix("error: ") if code else ""
