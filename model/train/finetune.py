"""Fine-tuning: initial weights from a directory or GGUF file (--init DIR, FILE.gguf or org/name), not random ones.

The directory has our native layout or a supported Hugging Face family's, with its tokenizer. The result is that
directory with new weights and all other files unchanged. A GGUF file stands for a directory of its family, whose other
files are made from it. A run copies these files, and its snapshots hold the weights, so that it can resume after the
directory was deleted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import Tokenizer as RustTokenizer

from model.checkpoint.checkpoint import load, stored_state
from model.checkpoint.gguf_directory import opened_weights
from model.checkpoint.golden_export import verify
from model.checkpoint.hub import resolve_weights
from model.checkpoint.manifest import check_manifest
from model.checkpoint.tensor_index import WEIGHTS_FILE, check_layout
from model.command_line import DTYPES
from model.config import ConfigError, ModelConfig
from model.families.registry import read_config, text_keys
from model.families.spec import FamilySpec
from model.files import CheckpointError, parse_object, read_bytes, read_json, write_files
from model.nn.transformer import Decoder
from model.tokenizer.tokenizer import Tokenizer
from model.train.options import check_sources
from model.train.reporting.console import print_stderr
from model.weights_version import Directory, WeightsVersion, path_of

_BASE_FOLDER = "init"
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_KEPT_FILES = re.compile(
    r"config\.json|generation_config\.json|tokenizer[\w.-]*\.(json|model)|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.(json|txt)|merges\.txt|chat_template\.(jinja|json)|(LICEN[CS]E|NOTICE)(\.(txt|md))?"
)
"""Files to keep from the model: everything except weights and documentation, which a run writes itself."""
_MAX_BYTES = 64 << 20
_LONGEST_WINDOW = 512
_LR_BY_WIDTH = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A model to fine-tune, without its weights."""

    directory: Path
    """Folder of its files, or GGUF file: the value of --init, or the run's own copy."""
    family: FamilySpec
    shape: ModelConfig
    tokenizer: Tokenizer
    """Its eos_id is the first end token in the model's config files."""
    files: Mapping[str, bytes]
    """Files that the result keeps: name -> content."""

    def decoder(self, device: torch.device) -> Decoder:
        """Loads its weights in float32 for training. Raises CheckpointError if they are damaged or do not match."""
        with opened_weights(self.directory, with_tokenizer=False) as directory:
            checkpoint = load(directory, device=device, dtype=torch.float32)
            check_manifest(directory, checkpoint.weights.hashes)
            if device.type == "cpu":
                verify(checkpoint.decoder, directory)
        return checkpoint.decoder.requires_grad_(True)

    def result(self, decoder: Decoder, dtype: torch.dtype) -> dict[str, bytes]:
        """Files of the directory with these weights: name -> content."""
        name, config = str(dtype).removeprefix("torch."), self.files[_CONFIG]
        raw = parse_object(config)
        kept = {key: value for key, value in text_keys(raw).items() if key != "quantization_config"}
        if name != _dtype(kept) or kept != raw:
            kept["dtype" if "dtype" in kept else "torch_dtype"] = name
            config = (json.dumps(kept, indent=2) + "\n").encode()
        state = stored_state(decoder, dtype)
        weights = save(self.family.save(self.shape, state), metadata={"format": "pt"})
        return {**self.files, _CONFIG: config, WEIGHTS_FILE: weights}


def load_base(options: argparse.Namespace, work: Path, *, resumes: bool) -> Base | None:
    """The model of --init; None without the flag. A resumed run reads its copy in `work`.

    Raises CheckpointError, ConfigError and TokenizerError.
    """
    kept = work / _BASE_FOLDER
    if resumes and kept.is_dir() != bool(options.init):
        how = "started with --init: pass it again" if kept.is_dir() else "started without --init: omit it"
        raise ConfigError(f"the run in {work} {how}, or start over with --overwrite")
    if not options.init:
        return None
    if resumes:
        return _read(kept)
    directory = resolve_weights(options.init, print_stderr)
    with opened_weights(directory) as opened:
        check_layout(opened)
        return replace(_read(opened), directory=directory)


def save_base_files(base: Base | None, work: Path) -> None:
    """Copies the files of the base model to `work`, replacing a previous run's. Raises CheckpointError."""
    shutil.rmtree(work / _BASE_FOLDER, ignore_errors=True)
    if base is not None:
        write_files(work / _BASE_FOLDER, base.files)


def apply_base_defaults(options: argparse.Namespace, base: Base) -> None:
    """Checks the flags against the model, and sets those whose defaults depend on it. Raises ConfigError."""
    model, most = f"the {base.family.name} in {base.directory}", base.shape.context
    check_sources(options, model, has_encoder=base.shape.n_encoder_layers > 0)
    if options.context is not None and not 2 <= options.context <= most:
        raise ConfigError(
            f"--context {options.context}: with --init it is the length of the windows to train on, from 2 to the "
            f"{most} positions that the model in {base.directory} has"
        )
    options.context = options.context or min(most, _LONGEST_WINDOW)
    options.export_dtype = options.export_dtype or _dtype(text_keys(parse_object(base.files[_CONFIG])))
    # Lower for wider models, in which a step has a larger effect. At width 256 it is 9.8e-4: there, fine-tuning our
    # model on 80 kB of plays lowered held-out bits per byte from 3.040 to 1.869 at 2e-4, 1.715 at 1e-3 and 1.733 at
    # 2e-3. GPT-2 (768) gets 1.9e-4, a 7 B model (4,096) 1.5e-5.
    options.lr = options.lr or _LR_BY_WIDTH / base.shape.width**1.5


def _dtype(config: Mapping[str, Any]) -> str:
    """The dtype in a config.json, as in transformers 4 and 5; float32 by default."""
    named = str(config.get("dtype", config.get("torch_dtype")))
    return named if named in DTYPES else "float32"


def _read(directory: Directory) -> Base:
    names = directory.files if isinstance(directory, WeightsVersion) else os.listdir(directory)  # noqa: PTH208
    kept = sorted(filter(_KEPT_FILES.fullmatch, names))
    files = {name: read_bytes(directory / name, _MAX_BYTES) for name in kept}
    config, generation = read_json(directory / _CONFIG), read_json(directory / _GENERATION, optional=True)
    try:
        config = dict(text_keys(config))
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
        directory=path_of(directory),
        family=family,
        shape=shape,
        tokenizer=_with_end_token(tokenizer, end, directory),
        files=files,
    )


def _with_end_token(tokenizer: Tokenizer, end: Any, directory: Directory) -> Tokenizer:
    """The same tokenizer with the model's end token; a character-level model may have none."""
    if end is None or end == tokenizer.eos_id:
        return tokenizer
    piece = tokenizer.piece(end) if type(end) is int and end >= 0 else ""
    if not piece:
        raise CheckpointError(f"{directory / _CONFIG}: eos_token_id {end!r} is not in its tokenizer.json")
    bos = None if tokenizer.bos_id is None else tokenizer.piece(tokenizer.bos_id)
    return Tokenizer(RustTokenizer.from_str(tokenizer.files()["tokenizer.json"]), piece, bos)
