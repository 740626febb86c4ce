"""Finds prebuilt native kernels at startup, and builds missing ones in the background for the next start.

The API process decides which kernels to use, because a restarted engine must compute exactly like the crashed one. A
build runs in its own process at idle priority, which exits with this process, even if that is killed:
app/engine/cpu/toolchain/guarded_subprocess.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from importlib.util import find_spec
from pathlib import Path

from app.common.python_child import python_command, python_environment
from app.common.settings import Settings
from app.engine.cpu.toolchain.backend_selection import TORCH, Libraries
from app.engine.cpu.toolchain.builder import compiler_commands, find
from app.engine.cpu.toolchain.cpu_target import BuildError
from app.engine.cpu.toolchain.guarded_subprocess import guarded_command
from app.engine_client.engine_pool import EnginePool

_log = logging.getLogger("inkstream")
_LIMIT_SECONDS = 6 * 3600.0
"""At idle priority on a busy machine a one-minute build may take hours without slowing anything else."""
_GRACE_SECONDS = 1.0


def libraries_at_start(settings: Settings) -> Libraries:
    """The native kernels that are built now, if the settings allow them."""
    found = None if settings.kernels == TORCH else find(settings.cache_dir)
    return Libraries(found=found, cache_dir=settings.cache_dir, has_torch=find_spec("torch") is not None)


async def build_for_next_start(engine: EnginePool, cache_dir: Path | None) -> None:
    """Builds native kernels if the engine falls back to torch without them. Never raises; cancelling stops it."""
    ready = await engine.wait_ready()
    if not ready.waits_for_build:
        return
    try:
        compiler_commands()
    except BuildError as error:
        _log.info("using torch, native kernels would be faster: %s", error)
        return
    _log.info("building native kernels for the next start (about a minute); using torch until then")
    try:
        problem = await _compile(cache_dir)
    except OSError as error:
        problem = os.strerror(error.errno or 0)
    if problem:
        _log.warning("native kernels could not be built, using torch: %s", problem)
    else:
        _log.info("native kernels are built: restart to use them")


async def _compile(cache_dir: Path | None) -> str:
    """Runs the build; returns an error message, or an empty string."""
    command = python_command("app", "compile", "--quiet", "--time-limit", str(_LIMIT_SECONDS))
    cache_option = ["--cache-dir", str(cache_dir)] if cache_dir else []
    process = await asyncio.create_subprocess_exec(
        *guarded_command([*command, *cache_option], idle=True),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=python_environment(),
    )
    assert process.stdin and process.stderr
    try:
        output = (await process.stderr.read()).decode("utf-8", "replace").strip().splitlines()
        code = await process.wait()
    finally:
        process.stdin.close()  # closing stdin makes the guarded subprocess kill everything that still runs
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _GRACE_SECONDS)
    return (output[-1] if output else f"exit code {code}").removeprefix("error: ") if code else ""
