"""TensorBoard, where it is installed: the log's records as scalars. Knows no terminal and no weights."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from model.train.data.text_file import DataError

_NOT_DRAWN = ("step", "fraction")


class TensorBoardLog:
    """Writes event files below a folder. Shown by: tensorboard --logdir DIR."""

    def __init__(self, folder: Path) -> None:
        """Raises DataError where TensorBoard is not installed."""
        try:  # not at the top: it is optional, and slow to import
            self._writer_class: Any = import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError:
            raise DataError(
                "--tensorboard: the package tensorboard is not installed; install it (pip install tensorboard) or "
                "leave the flag out, log.jsonl and loss.svg are written anyway"
            ) from None
        self._folder = folder

    def start(self, step: int) -> None:
        """What was told of later steps, before a resume, is not shown any more."""
        self._writer = self._writer_class(str(self._folder), purge_step=step + 1)

    def add(self, record: Mapping[str, Any]) -> None:
        """One record of the log, or a part of it; after start()."""
        for key, value in record.items():
            if key not in _NOT_DRAWN and value is not None:
                self._writer.add_scalar(key, value, record["step"])
        self._writer.flush()
