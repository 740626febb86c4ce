"""Converts the random checkpoints into each peer's own format, once, with the peer's own tools."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.shapes import Model

_ROOT = Path(__file__).parent.parent.parent
_WEIGHT_FORMATS = {"bf16": "fp32", "f32": "fp32", "int8": "int8"}
"""OpenVINO rounds to its configured compute precision when it loads a model."""


class ConvertError(RuntimeError):
    """A model that a peer does not take; the message is the reason in the table."""


def convert(peer: str, model: Model, precision: str, *, python: Path, folder: Path) -> Path:
    """The model's path for this peer; those that read our layout get it as it is. Raises ConvertError."""
    stem = f"{model.name}-{_fingerprint(model)}"
    if peer == "openvino":
        target = folder / f"{stem}-openvino-{_WEIGHT_FORMATS[precision]}"
        tool: list[str | Path] = [python.with_name("optimum-cli"), "export", "openvino", "--model", model.directory]
        task = ["--task", "text-generation-with-past", "--weight-format", _WEIGHT_FORMATS[precision]]
        return made(target, [*tool, *task])
    if peer == "llama.cpp":
        target = folder / f"{stem}-{precision}.gguf"
        program: list[str | Path] = [python, "-m", "benchmarks.peers.sides.write_gguf", model.directory]
        return made(target, program, after=[precision])
    if peer == "ctranslate2":
        tool = [python.with_name("ct2-transformers-converter"), "--model", model.directory, "--output_dir"]
        return made(folder / f"{stem}-ctranslate2", tool)
    return model.directory


def _fingerprint(model: Model) -> str:
    """Other weights under the same name are another model."""
    content = (model.directory / "model.safetensors").read_bytes()
    return hashlib.sha256(content).hexdigest()[:12]


def made(target: Path, command: Sequence[str | Path], after: Sequence[str] = ()) -> Path:
    """Runs the command on a temporary path next to the target, and renames it once the command has succeeded."""
    if target.exists():
        return target
    folder = target.parent
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"part-{target.name}"
    shutil.rmtree(part, ignore_errors=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*command, part, *after], cwd=_ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode or not part.exists():
        lines = [line for line in done.stderr.splitlines() if "rror" in line] or [f"exit code {done.returncode}"]
        raise ConvertError(f"the conversion failed: {lines[-1].strip()[:200]}")
    part.rename(target)
    return target
