"""Faults of app/faults.py, armed and disarmed by a test while a service runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app import faults


class Faults:
    """A folder that a service was started with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        """For start_server(environment=...)."""
        return {faults.VARIABLE: str(self.folder)}

    def arm(self, point: str, do: str, **order: Any) -> None:
        """See app/faults.py for what can be ordered."""
        new = self.folder / f".{point}"
        new.write_text(json.dumps({"do": do, **order}))
        new.replace(self.folder / point)

    def disarm(self, point: str) -> None:
        """Nothing happens there any more."""
        (self.folder / point).unlink(missing_ok=True)

    def is_armed(self, point: str) -> bool:
        """Whether it is still to happen; a fault with `times` disarms itself."""
        return (self.folder / point).exists()


def arm_this_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """For an engine in the test's own process."""
    monkeypatch.setattr(faults, "_SWITCHBOARD", faults._Switchboard(folder))
    return Faults(folder)
