"""Says so in the log while the process has no file descriptors left. asyncio only."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time

_LOOK_SECONDS = 1.0
_SAY_SECONDS = 60.0
_log = logging.getLogger("inkstream")


async def watch_descriptors() -> None:
    """Looks until it is cancelled. uvloop closes the connections that it cannot accept, and tells nobody."""
    said = float("-inf")
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            if time.monotonic() - said >= _SAY_SECONDS:
                said = time.monotonic()
                _log.error("no file descriptors left: new connections are closed; raise ulimit -n")
