"""Exports a finished run: weights, tokenizer, sampling defaults and a model card, all or nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from model.checkpoint.checkpoint import weights_files
from model.checkpoint.golden import GOLDEN_FILE, LONGEST, as_stored, golden_file
from model.checkpoint.layout_check import WEIGHTS_FILE
from model.checkpoint.manifest import MANIFEST_FILE, manifest_file
from model.files import parse_object, write_files
from model.nn.transformer import Decoder
from model.tokenizer.tokenizer import Tokenizer
from model.train.common.sample import Drawing, Sample
from model.train.reporting.model_card import RunFacts, model_card
from model.train.setup.finetune import Base


def write_result(
    out: Path,
    decoder: Decoder,
    tokenizer: Tokenizer,
    facts: RunFacts,
    dtype: torch.dtype,
    *,
    samples: Sequence[Sample],
    drawing: Drawing,
    base: Base | None,
) -> None:
    """Writes a directory that serves. Raises CheckpointError.

    drawing: of the samples, and the sampling defaults of a model that has no `base` to keep them from.
    """
    files = base.result(decoder, dtype) if base else _new_files(decoder, tokenizer, dtype, drawing)
    ids = tokenizer.encode(" ".join(sample.prompt for sample in samples))
    # A vocabulary of few words may know none of the prompts'.
    golden_prompt = (ids if len(ids) > 1 else [0, 0])[: min(LONGEST, decoder.config.context)]
    files[GOLDEN_FILE] = golden_file(as_stored(decoder, dtype), golden_prompt)
    sha256 = hashlib.sha256(files[WEIGHTS_FILE]).hexdigest()
    family, n_params = parse_object(files["config.json"])["model_type"], decoder.n_params
    card = model_card(decoder.config, n_params, facts, samples, family=family, drawing=drawing, sha256=sha256).encode()
    # Write the manifest last: until it exists, a reader of the directory sees that it is incomplete.
    write_files(out, {**files, "README.md": card, MANIFEST_FILE: manifest_file(files)})


def _new_files(decoder: Decoder, tokenizer: Tokenizer, dtype: torch.dtype, drawing: Drawing) -> dict[str, bytes]:
    """Weights, tokenizer and sampling defaults of a model that had none."""
    generation = {"do_sample": True, **asdict(drawing)} if drawing.temperature else {"do_sample": False}
    files = weights_files(decoder, dtype=dtype, eos_id=tokenizer.eos_id, generation=generation)
    return files | {name: content.encode() for name, content in tokenizer.files().items()}
