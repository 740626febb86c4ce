"""What a finished run leaves behind: weights, tokenizer, sampling defaults and a card, all or nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from model.checkpoint import weights_files
from model.files import write_files
from model.golden import GOLDEN_FILE, LONGEST, as_stored, golden_file
from model.manifest import MANIFEST_FILE, manifest_file
from model.presence import WEIGHTS_FILE
from model.tokenizer import Tokenizer
from model.train.card import RunFacts, model_card
from model.train.sample import Drawing, Sample
from model.transformer import Decoder


def write_result(
    out: Path,
    decoder: Decoder,
    tokenizer: Tokenizer,
    facts: RunFacts,
    dtype: torch.dtype,
    *,
    samples: Sequence[Sample],
    drawing: Drawing,
) -> None:
    """Writes a directory that serves. drawing: becomes its sampling defaults. Raises CheckpointError."""
    generation = {"do_sample": True, **asdict(drawing)} if drawing.temperature else {"do_sample": False}
    files = weights_files(decoder, dtype=dtype, eos_id=tokenizer.eos_id, generation=generation)
    files |= {name: content.encode() for name, content in tokenizer.files().items()}
    ids = tokenizer.encode(" ".join(sample.prompt.text for sample in samples))
    # A vocabulary of few words may know none of the prompts'.
    golden_prompt = (ids if len(ids) > 1 else [0, 0])[: min(LONGEST, decoder.config.context)]
    files[GOLDEN_FILE] = golden_file(as_stored(decoder, dtype), golden_prompt)
    sha256 = hashlib.sha256(files[WEIGHTS_FILE]).hexdigest()
    card = model_card(decoder.config, decoder.n_params, facts, samples, drawing=drawing, sha256=sha256).encode()
    # The manifest comes last: until it is there, whoever looks at the directory sees that it is not whole.
    write_files(out, {**files, "README.md": card, MANIFEST_FILE: manifest_file(files)})
