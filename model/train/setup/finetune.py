"""Fine-tuning: initial weights from a directory (--init DIR) instead of random ones.

The directory is a native one, or one of a supported Hugging Face family, with its tokenizer. The result is that
directory with new weights and all other files unchanged. A run copies those files and keeps its weights in its
snapshots, so that it can resume after the directory was deleted.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import Tokenizer as RustTokenizer

from model.checkpoint.checkpoint import load, stored_state
from model.checkpoint.golden import verify
from model.checkpoint.manifest import check_manifest
from model.checkpoint.tensor_index import WEIGHTS_FILE, check_layout
from model.config import ConfigError, ModelConfig
from model.families.registry import read_config
from model.families.spec import FamilySpec
from model.files import CheckpointError, parse_object, read_bytes, read_json, write_files
from model.nn.transformer import Decoder
from model.tokenizer.tokenizer import Tokenizer
from model.train.setup.options import check_sources

_FOLDER = "init"
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_KEPT = re.compile(
    r"config\.json|generation_config\.json|tokenizer[\w.-]*\.(json|model)|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.(json|txt)|merges\.txt|chat_template\.(jinja|json)|(LICEN[CS]E|NOTICE)(\.(txt|md))?"
)
"""What is a model's own but neither its weights nor a description of them, which a run writes itself."""
_MOST_BYTES = 64 << 20
_LONGEST_WINDOW = 512
_LR_BY_WIDTH = 4.0
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A model to go on from, without its weights."""

    directory: Path
    """Where its files stand: what --init names, or the run's own folder."""
    family: FamilySpec
    shape: ModelConfig
    tokenizer: Tokenizer
    """Its eos_id is the token that the model's own files name first."""
    files: Mapping[str, bytes]
    """What the result keeps: name -> content."""

    @property
    def dtype(self) -> str:
        """The number format that its config.json names, as transformers 4 and 5 do, or float32 as they take it."""
        raw = self._config()
        named = str(raw.get("dtype", raw.get("torch_dtype")))
        return named if named in _DTYPES else "float32"

    @property
    def lr(self) -> float:
        """AdamW's rate where no flag gives one: less for wider models, in which one step adds up more.

        At width 256 it is 9.8e-4. 80 kB of plays brought our model there from 3.040 held-out bits per byte to 1.869 at
        2e-4, 1.715 at 1e-3 and 1.733 at 2e-3. GPT-2 (768) gets 1.9e-4, a model of 7 billion (4,096) 1.5e-5.
        """
        rate: float = _LR_BY_WIDTH / self.shape.width**1.5
        return rate

    def window(self, context: int | None) -> int:
        """Tokens of a training window where --context says so. Raises ConfigError."""
        most = self.shape.context
        if context is not None and not 2 <= context <= most:
            raise ConfigError(
                f"--context {context}: with --init it is the length of the windows to train on, from 2 to the {most} "
                f"positions that the model in {self.directory} has"
            )
        return context or min(most, _LONGEST_WINDOW)

    def decoder(self, device: torch.device) -> Decoder:
        """Its weights in float32, ready to learn. Raises CheckpointError where they are not whole or not its own."""
        checkpoint = load(self.directory, device=device, dtype=torch.float32)
        check_manifest(self.directory, checkpoint.hashes)
        if device.type == "cpu":
            verify(checkpoint.decoder, self.directory)
        return checkpoint.decoder.requires_grad_(True)

    def result(self, decoder: Decoder, dtype: torch.dtype) -> dict[str, bytes]:
        """The directory with these weights instead: name -> content."""
        name, raw = str(dtype).removeprefix("torch."), self._config()
        config = self.files[_CONFIG]
        if name != self.dtype:
            key = "dtype" if "dtype" in raw else "torch_dtype"
            config = (json.dumps({**raw, key: name}, indent=2) + "\n").encode()
        state = stored_state(decoder, dtype)
        weights = save(self.family.save(self.shape, state), metadata={"format": "pt"})
        return {**self.files, _CONFIG: config, WEIGHTS_FILE: weights}

    def _config(self) -> dict[str, Any]:
        return parse_object(self.files[_CONFIG])


def base_of(options: argparse.Namespace, work: Path, *, resumes: bool) -> Base | None:
    """What --init names; None without it. A run that goes on reads what it kept in `work`.

    Raises CheckpointError, ConfigError and TokenizerError.
    """
    kept = work / _FOLDER
    if resumes and kept.is_dir() != bool(options.init):
        how = "began with --init: give it again" if kept.is_dir() else "did not begin with --init: leave it out"
        raise ConfigError(f"the run in {work} {how}, or start anew with --overwrite")
    if not options.init:
        return None
    if not resumes:
        check_layout(Path(options.init))
    return _read(kept if resumes else Path(options.init))


def start_anew(base: Base | None, work: Path) -> None:
    """What a run keeps of the model that it goes on from, in place of what the one before kept.

    Raises CheckpointError.
    """
    shutil.rmtree(work / _FOLDER, ignore_errors=True)
    if base is not None:
        write_files(work / _FOLDER, base.files)


def settle(options: argparse.Namespace, base: Base) -> None:
    """Holds the flags against the model, and fills in those whose defaults depend on it. Raises ConfigError."""
    model = f"the {base.family.name} in {base.directory}"
    check_sources(options, model, has_encoder=base.shape.n_encoder_layers > 0)
    options.context = base.window(options.context)
    options.export_dtype = options.export_dtype or base.dtype
    options.lr = options.lr or base.lr


def _read(directory: Path) -> Base:
    names = sorted(path.name for path in directory.iterdir() if _KEPT.fullmatch(path.name))
    files = {name: read_bytes(directory / name, _MOST_BYTES) for name in names}
    config, generation = read_json(directory / _CONFIG), read_json(directory / _GENERATION, optional=True)
    try:
        family, shape = read_config(config)
    except ConfigError as error:
        raise CheckpointError(f"{directory / _CONFIG}: {error}") from None
    tokenizer = Tokenizer.load(directory)
    if tokenizer.vocab_size > shape.vocab_size:
        raise CheckpointError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} tokens, the model only {shape.vocab_size}"
        )
    named = {**config, **generation}.get("eos_token_id")
    end = named[0] if isinstance(named, list) and named else named
    return Base(
        directory=directory, family=family, shape=shape, tokenizer=_ended(tokenizer, end, directory), files=files
    )


def _ended(tokenizer: Tokenizer, end: Any, directory: Path) -> Tokenizer:
    """The same tokenizer, whose end token is the model's; a model of single characters may have none."""
    if end is None or end == tokenizer.eos_id:
        return tokenizer
    piece = tokenizer.piece(end) if type(end) is int and end >= 0 else ""
    if not piece:
        raise CheckpointError(f"{directory / _CONFIG}: eos_token_id {end!r} is no token of its tokenizer.json")
    bos = None if tokenizer.bos_id is None else tokenizer.piece(tokenizer.bos_id)
    return Tokenizer(RustTokenizer.from_str(tokenizer.files()["tokenizer.json"]), piece, bos)
