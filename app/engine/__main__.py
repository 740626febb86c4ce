"""Entry point of the engine process: `python -m app.engine FD`, started by app/engine_client/client.py."""

from __future__ import annotations

import gc
import logging
import os
import sys

if __name__ == "__main__":
    # Imports leave next to no garbage; looking for it among all that torch brings took a third of an engine's CPU
    # time from its start to its end, and every start after a crash waited for it.
    gc.disable()
    from app.engine.startup import assemble
    from app.engine.worker_loop import run

    gc.freeze()
    gc.enable()
    code = run(int(sys.argv[1]), assemble)
    logging.shutdown()
    os._exit(code)  # skip torch's teardown, and do not wait for a grammar that is still compiling
