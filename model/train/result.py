"""What a finished run leaves behind: weights, tokenizer, sampling defaults, samples and a card, all or nothing."""

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
from model.train.init import Base
from model.train.sample import Drawing, Prompt, sample_text
from model.transformer import Decoder

_LIVELY = Drawing(temperature=0.8, top_p=0.95)
_GREEDY = Drawing(temperature=0.0)


def write_result(
    out: Path,
    decoder: Decoder,
    tokenizer: Tokenizer,
    facts: RunFacts,
    dtype: torch.dtype,
    *,
    prompts: Sequence[Prompt],
    greedy: bool,
    base: Base | None,
) -> None:
    """Writes a directory that serves, and prints the samples. Raises CheckpointError."""
    drawing = _GREEDY if greedy else _LIVELY
    files = base.result(decoder, dtype) if base else _new_files(decoder, tokenizer, dtype, drawing)
    ids = tokenizer.encode(" ".join(prompt.text for prompt in prompts))
    # A vocabulary of few words may know none of the prompts'.
    golden_prompt = (ids if len(ids) > 1 else [0, 0])[: min(LONGEST, decoder.config.context)]
    files[GOLDEN_FILE] = golden_file(as_stored(decoder, dtype), golden_prompt)
    samples = [(prompt, sample_text(decoder, tokenizer, prompt, 120, seed=1, drawing=drawing)) for prompt in prompts]
    for prompt, text in samples:
        print(f"--- {prompt.joined(text)}\n", flush=True)
    sha256 = hashlib.sha256(files[WEIGHTS_FILE]).hexdigest()
    card = model_card(decoder.config, decoder.n_params, facts, samples, sha256).encode()
    # The manifest comes last: until it is there, whoever looks at the directory sees that it is not whole.
    write_files(out, {**files, "README.md": card, MANIFEST_FILE: manifest_file(files)})


def _new_files(decoder: Decoder, tokenizer: Tokenizer, dtype: torch.dtype, drawing: Drawing) -> dict[str, bytes]:
    """Weights, tokenizer and sampling defaults of a model that had none."""
    generation = {"do_sample": True, **asdict(drawing)} if drawing.temperature else {"do_sample": False}
    files = weights_files(decoder, dtype=dtype, eos_id=tokenizer.eos_id, generation=generation)
    return files | {name: content.encode() for name, content in tokenizer.files().items()}
