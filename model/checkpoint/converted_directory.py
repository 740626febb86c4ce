"""Makes a weights directory of other weights: tensors (model/checkpoint/conversion.py), and the files beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from model.checkpoint.conversion import ConversionPlan, Dtype, Progress, plan
from model.checkpoint.gguf_directory import opened_weights
from model.checkpoint.golden import GOLDEN_FILE
from model.checkpoint.hub_metadata import MAX_SMALL_BYTES, SMALL_FILES
from model.checkpoint.manifest import MANIFEST_FILE, manifest_of, read_model_name
from model.checkpoint.new_directory import check_space, new_directory
from model.checkpoint.stored_weights import StoredWeights, find_weights
from model.checkpoint.tensor_index import INDEX_FILE, WEIGHTS_FILE, check_layout
from model.families.registry import read_config
from model.families.spec import FamilySpec
from model.files import entry_exists, read_bytes, read_json, regular_file, sha256
from model.weights_version import File, WeightsVersion

CONFIG_FILE = "config.json"
_MADE_ANEW = (CONFIG_FILE, MANIFEST_FILE, INDEX_FILE, GOLDEN_FILE)
_DTYPE_KEYS = ("dtype", "torch_dtype")
"""transformers 5, transformers 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionSource:
    """Weights in any format that is read, and the files that belong to them."""

    weights: StoredWeights
    config: Mapping[str, Any]
    """The whole config.json."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Content of the tokenizer's and other small files, by name."""
    golden: bytes = b""
    """golden.json; empty if there is none."""
    model_name: str | None = None
    family: FamilySpec | None = None
    """To write its names and its layout, if the weights have other ones."""
    dtype: Dtype | None = None
    """Number format to write by default; None for that of plan()."""

    @property
    def n_bytes(self) -> int:
        """Bytes of the files with tensors."""
        return sum(os.stat(str(path)).st_size for path in self.weights.paths)  # noqa: PTH116 (of any kind of file)


def open_directory(directory: Path) -> ConversionSource:
    """A weights directory that the service would serve, checked but for its numbers. Raises CheckpointError."""
    check_layout(directory)
    weights = find_weights(directory, digest=lambda _: "")
    return ConversionSource(
        weights=weights,
        config=read_json(directory / CONFIG_FILE),
        files=companion_files(directory),
        golden=_golden(directory),
        model_name=read_model_name(directory),
    )


def open_gguf(path: Path) -> ConversionSource:
    """A model for which find_gguf() finds files, to write as its family does. Raises CheckpointError."""
    with opened_weights(path) as directory:
        assert isinstance(directory, WeightsVersion), f"{path} has no GGUF file"
        weights = find_weights(directory, digest=lambda _: "")
        config = read_json(directory / CONFIG_FILE)
        names = sorted(name for name in directory.files if SMALL_FILES.fullmatch(name) and name not in _MADE_ANEW)
        files = {name: _read_small(directory / name) for name in names}
    family, _ = read_config(config)
    return ConversionSource(weights=weights, config=config, files=files, family=family, dtype=config["dtype"])


def companion_files(directory: Path) -> dict[str, bytes]:
    """The small files of a directory that a conversion does not change, by name. Raises CheckpointError."""
    names = sorted(path.name for path in directory.iterdir() if SMALL_FILES.fullmatch(path.name))
    return {name: _read_small(directory / name) for name in names if name not in _MADE_ANEW}


def _golden(directory: Path) -> bytes:
    path = directory / GOLDEN_FILE
    return _read_small(path) if entry_exists(path) else b""


def _read_small(path: File) -> bytes:
    """The content. Python allocates what it may read, so it may read no more than there is. Raises CheckpointError."""
    return read_bytes(path, min(MAX_SMALL_BYTES, regular_file(path).stat().st_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedDirectory:
    """A directory to write."""

    out: Path
    source: ConversionSource
    conversion: ConversionPlan

    @property
    def leaves_out_golden(self) -> bool:
        """Whether the source has a golden.json that does not hold for the new numbers."""
        return bool(self.source.golden) and not self.conversion.keeps_numbers

    def write(self, progress: Progress) -> None:
        """Writes everything or nothing. Raises CheckpointError."""
        small = {**self.source.files, CONFIG_FILE: self._config()}
        if self.source.golden and not self.leaves_out_golden:
            small[GOLDEN_FILE] = self.source.golden
        check_space(self.out, self.conversion.n_bytes + sum(map(len, small.values())))
        with new_directory(self.out) as folder:
            with _new_file(folder / WEIGHTS_FILE) as file:
                self.conversion.write(file, progress)
            for name, content in small.items():
                with _new_file(folder / name) as file:
                    file.write(content)
            hashes = {name: sha256(folder / name) for name in (WEIGHTS_FILE, *small)}
            with _new_file(folder / MANIFEST_FILE) as file:
                file.write(manifest_of(hashes, self.source.model_name))

    def _config(self) -> bytes:
        """config.json with the new number format, and with the new quantization_config in place of the old one."""
        dtypes = self.conversion.dtypes
        config = _changed(self.source.config, next(iter(dtypes)) if len(dtypes) == 1 else None)
        if read_config(config)[1] != self.source.weights.config:
            # Gemma's embedding is scaled by a number that is rounded to this dtype, so it names what was trained.
            config = _changed(self.source.config, None)
        if quantization := self.conversion.quantization_config():
            config["quantization_config"] = quantization
        return (json.dumps(config, indent=2) + "\n").encode()


def _changed(config: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    """The config without a quantization and with this dtype, in its text_config, too."""
    changed = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(text := changed.get("text_config"), Mapping):
        changed["text_config"] = _changed(text, dtype)
    keys = [key for key in _DTYPE_KEYS if key in changed] or [_DTYPE_KEYS[0]]
    return changed | (dict.fromkeys(keys, dtype) if dtype else {})


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A new file, whose content is on disk after the block. Raises OSError."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def prepare(source: ConversionSource, out: Path, *, dtype: Dtype | None, bits: int) -> ConvertedDirectory:
    """Plans the directory. Raises CheckpointError. See plan()."""
    conversion = plan(source.weights, dtype=dtype or source.dtype, bits=bits, family=source.family)
    return ConvertedDirectory(out=out, source=source, conversion=conversion)
