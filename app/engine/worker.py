"""The engine process: `python -m app.engine.worker FD`, started by app/engine/client.py.

The only file that brings together the engine and the pipe.
"""

from __future__ import annotations

import sys

from app.engine.assembly import assemble
from app.engine.loop import run

if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), assemble))
