"""Weights by name: org/name[@revision][:quantization] of the Hugging Face Hub in place of a directory.

resolve_weights() turns what a user gave into a directory; a model of the Hub is downloaded into the cache that all
Hugging Face tools share. source_of() tells from a directory which model and commit it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from model.checkpoint.gguf_directory import gguf_notes, is_model_file
from model.files import CheckpointError

_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(@(?P<revision>[^@:\s]{0,255}))?"
    r"(:(?P<quantization>[^@:\s]{0,100}))?",
    re.A,
)
COMMIT = re.compile(r"[0-9a-f]{40}")
"""git's name of a commit."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the Hub as a user names it."""

    repository: str
    """org/name"""
    revision: str
    """Branch, tag or commit."""
    quantization: str = ""
    """Of the GGUF file that is meant, such as Q4_K_M; empty if the repository has safetensors or one such file."""

    @property
    def is_commit(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return bool(COMMIT.fullmatch(self.revision))

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return self.repository + revision + (f":{self.quantization}" if self.quantization else "")


@dataclass(frozen=True, slots=True)
class HubSource:
    """Where a directory of the cache comes from."""

    repository: str
    commit: str


def hub_model(weights: str) -> HubModel | None:
    """The model that this names; None if it is a path. Raises CheckpointError for a name that is almost one."""
    if re.match(r"(hf|https?):/", weights):
        raise CheckpointError(f"{weights}: is a URL; give the model's name: org/name, or org/name@revision")
    found = _NAME.fullmatch(weights)
    if found is None or os.path.lexists(weights):
        return None
    revision = found["revision"]
    if ".." in weights or (revision is not None and not (revision.isprintable() and all(revision.split("/")))):
        raise CheckpointError(
            f"{weights}: is not a model's name; write org/name, or org/name@ and a branch, tag or commit"
        )
    quantization = found["quantization"]
    if quantization is not None and not re.fullmatch(r"[A-Za-z0-9][\w.-]*", quantization, re.A):
        raise CheckpointError(f"{weights}: has no quantization after the colon, such as {found['repository']}:Q4_K_M")
    return HubModel(found["repository"], found["revision"] or "main", quantization or "")


def resolve_weights(weights: Path | str, say: Callable[[str], None]) -> Path:
    """The weights directory or GGUF file that the user gave, or the Hub model's, downloaded if need be.

    A directory wins over a model of the same name, and `say` gets a line that says so. It also gets a line before the
    weights are downloaded and one after; a terminal shows the progress between them. Raises CheckpointError.
    """
    text = str(weights)
    named = hub_model(text)
    if named is None:
        if _NAME.fullmatch(text) and os.path.isdir(text):  # noqa: PTH112 (pathlib raises for folders not to be entered)
            say(f"{text}: this directory is used, not a model of the Hugging Face Hub with the same name")
        for note in gguf_notes(Path(text)):
            say(note)
        return Path(text)
    # Imported when a model is named: with its libraries it takes a third of a second.
    directory: Path = import_module("model.checkpoint.hub_download").fetch(named, say)
    return directory


def source_of(directory: Path) -> HubSource | None:
    """Model and commit of a directory, or of a GGUF file, in the cache of the Hub; None for any other."""
    real = directory.resolve()
    if is_model_file(directory.name):
        in_snapshot = directory.parent.resolve()
        real = in_snapshot if in_snapshot.parent.name == "snapshots" else in_snapshot.parent
    kind, _, repository = real.parent.parent.name.partition("--")
    if kind != "models" or real.parent.name != "snapshots" or not COMMIT.fullmatch(real.name):
        return None
    return HubSource(repository.replace("--", "/"), real.name)
