"""Asks a confined process what a pickle holds (app/cli/torch_file_worker.py)."""

from __future__ import annotations

from pathlib import Path

from app.common.errors import EngineFailed
from app.sandbox.sandbox import Sandbox, SandboxError
from model.checkpoint.torch_file import Question, TorchFile, decode_characters, decode_file
from model.files import CheckpointError, regular_file

_SECONDS = 30.0
"""For one file; that of a nanoGPT with its optimizer takes milliseconds."""
_MAX_ANSWER_BYTES = 32 << 20


def read_torch_file(path: Path) -> TorchFile:
    """The tensors that a file of torch.save() holds. Raises CheckpointError."""
    return decode_file(path, _ask(path, has_characters=False))


def read_characters(path: Path) -> dict[str, int]:
    """The characters of a nanoGPT's meta.pkl, with their ids. Raises CheckpointError."""
    return decode_characters(path, _ask(path, has_characters=True))


def _ask(path: Path, *, has_characters: bool) -> bytes:
    real = regular_file(path).absolute()
    sandbox = Sandbox("app.cli.torch_file_worker", str(_SECONDS))
    try:
        question = Question(path=str(real), has_characters=has_characters)
        return sandbox.call(question.encode(), seconds=_SECONDS, max_bytes=_MAX_ANSWER_BYTES)
    except SandboxError as error:
        raise CheckpointError(f"{path}: {error} to read") from None
    except EngineFailed as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    finally:
        sandbox.close()
