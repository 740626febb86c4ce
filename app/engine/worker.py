"""The engine process: `python -m app.engine.worker FD`, started by app/engine_client/client.py.

The only file that brings together the engine and the pipe.
"""

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
    os._exit(code)  # taking torch apart again helps nobody, and a guide that is being compiled would be waited for
