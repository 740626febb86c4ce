"""`serve` with the fake engine: `python fake_service.py STEP_MS serve FLAGS...`; all else is the service itself."""

from __future__ import annotations

import sys
from pathlib import Path

from app import main as wiring
from app.__main__ import main
from app.engine import client

if __name__ == "__main__":
    command = (sys.executable, "-P", str(Path(__file__).with_name("fake_engine.py")), sys.argv[1])
    client.EngineClient.__init__.__kwdefaults__["command"] = command
    assert wiring.EngineClient is client.EngineClient
    sys.exit(main(sys.argv[2:]))
