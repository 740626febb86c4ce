"""Faults of app/common/fault_injection.py, armed and disarmed by a test while a service runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from app.common import fault_injection


class Faults:
    """A folder that a service was started with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for start_server(environment=...)."""
        return {fault_injection.VARIABLE: str(self.folder)}

    def removing(self, *protections: str) -> dict[str, str]:
        """`environment`, for a service without these protections while they are armed (removed_protections.py)."""
        code = f"from tests.support.removed_protections import install\ninstall(*{protections})\n"
        (self.folder / "sitecustomize.py").write_text(code)
        return {**self.environment, "PYTHONPATH": str(self.folder)}

    def arm(self, point: str, do: str, **order: Any) -> None:
        """See app/common/fault_injection.py for what can be ordered."""
        new = self.folder / f".{point}"
        new.write_text(json.dumps({"do": do, **order}))
        new.replace(self.folder / point)

    @contextmanager
    def armed(self, point: str, do: str, **order: Any) -> Iterator[None]:
        """arm() for a block."""
        self.arm(point, do, **order)
        try:
            yield
        finally:
            self.disarm(point)

    def disarm(self, *points: str) -> None:
        """Nothing happens there any more; nowhere, if none is named."""
        for path in map(self.folder.joinpath, points or [path.name for path in self.folder.glob("*.*")]):
            if path.suffix != ".py":  # removing() has written it
                path.unlink(missing_ok=True)

    def is_armed(self, point: str) -> bool:
        """Whether it is still to happen; a fault with `times` disarms itself."""
        return (self.folder / point).exists()


def arm_this_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Arms faults of an engine in the test's own process."""
    monkeypatch.setattr(fault_injection, "_REGISTRY", fault_injection._FaultRegistry(folder))
    return Faults(folder)
