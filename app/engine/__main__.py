"""Entry point of the engine process: `python -m app.engine FD`, started by app/engine_client/engine_process.py."""

from __future__ import annotations

import gc
import logging
import os
import select
import sys

if __name__ == "__main__":
    from app.common.operating_system import die_with_parent
    from app.common.start_signals import ignore_stop_signals

    ignore_stop_signals()
    die_with_parent()
    connection = select.poll()
    connection.register(int(sys.argv[1]), 0)
    if connection.poll(0):  # the parent ended before that call
        os._exit(0)
    # Imports create almost no garbage, but collecting it among torch's objects took a third of an engine's CPU time
    # over its whole life, and delayed every restart after a crash.
    gc.disable()
    from app.engine.startup import build_engine
    from app.engine.worker_loop import run

    gc.freeze()
    gc.enable()
    code = run(int(sys.argv[1]), build_engine)
    logging.shutdown()
    os._exit(code)  # skip torch's teardown, and do not wait for a grammar that is still compiling
