"""The service with the fake engine: `python -m tests.support.fake_service STEP_MS serve FLAGS...`."""

from __future__ import annotations

import sys

from app.__main__ import main
from app.engine_client import replica
from app.serving import instance_factory

if __name__ == "__main__":
    command = (sys.executable, "-P", "-m", "tests.support.fake_engine", sys.argv[1])
    replica.Replica.__init__.__kwdefaults__["command"] = command
    assert instance_factory.Replica is replica.Replica
    sys.exit(main(sys.argv[2:]))
