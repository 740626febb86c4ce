"""Arms and disarms the faults of app/common/fault_injection.py while a service runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from app.common import fault_injection


class Faults:
    """The fault folder of a service; `environment` passes it to start_server()."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for start_server(environment=...)."""
        return {fault_injection.VARIABLE: str(self.folder)}

    def removing(self, *protections: str) -> dict[str, str]:
        """`environment` of a service that lacks these protections while they are armed (removed_protections.py)."""
        code = f"from tests.support.removed_protections import install\ninstall(*{protections})\n"
        (self.folder / "sitecustomize.py").write_text(code)
        return {**self.environment, "PYTHONPATH": str(self.folder)}

    def arm(self, point: str, do: str, **order: Any) -> None:
        """Arms a fault; app/common/fault_injection.py documents `do` and `order`."""
        new = self.folder / f".{point}"
        new.write_text(json.dumps({"do": do, **order}))
        new.replace(self.folder / point)

    @contextmanager
    def armed(self, point: str, do: str, **order: Any) -> Iterator[None]:
        """Arms a fault for the block."""
        self.arm(point, do, **order)
        try:
            yield
        finally:
            self.disarm(point)

    def disarm(self, *points: str) -> None:
        """Disarms the faults at these points; all faults if none is given."""
        for path in map(self.folder.joinpath, points or [path.name for path in self.folder.glob("*.*")]):
            if path.suffix != ".py":  # written by removing()
                path.unlink(missing_ok=True)

    def is_armed(self, point: str) -> bool:
        """Whether the fault is still armed; one with `times` disarms itself."""
        return (self.folder / point).exists()


def arm_this_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Lets a test arm faults of an engine in its own process."""
    monkeypatch.setattr(fault_injection, "_REGISTRY", fault_injection._FaultRegistry(folder))
    return Faults(folder)
