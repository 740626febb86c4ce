"""python -m app check DIR: would this weights directory serve? Loads and tries all of it, and prints its facts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from app.cli.try_tokenizer import TriedTokenizer, try_tokenizer
from app.engine.defaults import sampling_defaults
from model.arguments import OneLineParser
from model.chat_template import read_chat_template
from model.checkpoint import Checkpoint, load
from model.describe import Line, memory_lines, shape_lines
from model.files import CheckpointError, one_line
from model.golden import GOLDEN_FILE, verify
from model.manifest import MANIFEST_FILE, check_manifest
from model.presence import check_layout
from model.reference import logits
from model.transformer import Decoder


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 fine, 2 not; one line then names the file and the reason."""
    parser = OneLineParser(prog="inkstream check", description="Validate a weights directory.")
    parser.add_argument("directory", metavar="DIR")
    given = parser.parse_args(argv).directory
    if not given:
        parser.error("DIR is empty; . is the directory that you are in")
    directory = Path(given)
    try:
        lines = _check(directory)
    except ValueError as error:  # CheckpointError, TokenizerError, sampling defaults: all name their file
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return 2
    print(one_line(f"{directory}: fine"))
    for what, text in lines:
        print(f"  {what:<13}{one_line(text)}")
    return 0


def _check(directory: Path) -> list[Line]:
    """Raises ValueError with the name of the file and the reason."""
    check_layout(directory)
    checkpoint = load(directory, device=torch.device("cpu"), dtype=torch.float32)
    decoder = checkpoint.decoder
    tried = try_tokenizer(directory, decoder.config.vocab_size)
    _try(decoder, tried.sample, directory)
    difference = verify(decoder, directory)
    is_whole = check_manifest(directory, checkpoint.hashes)
    defaults = sampling_defaults(checkpoint.generation, directory / "generation_config.json")
    golden = f"no {GOLDEN_FILE}" if difference is None else f"met, largest difference {difference:.1e}"
    return [
        ("family", checkpoint.family),
        *shape_lines(decoder.config),
        *memory_lines(decoder.config, decoder.n_params),
        *_tokenizer_lines(checkpoint, tried),
        ("chat", "no template" if read_chat_template(directory) is None else "a template"),
        ("defaults", ", ".join(f"{name} {value:g}" for name, value in defaults.items()) or "none"),
        ("golden", golden),
        ("manifest", "met" if is_whole else f"no {MANIFEST_FILE}"),
        ("version", checkpoint.version),
    ]


def _try(decoder: Decoder, ids: list[int], directory: Path) -> None:
    sample = ids[: decoder.config.context]
    answer = logits(decoder, sample, source=sample if decoder.config.n_encoder_layers else None)
    if not torch.isfinite(answer).all():
        raise CheckpointError(f"{directory / 'config.json'}: with these weights it gives logits that are not finite")


def _tokenizer_lines(checkpoint: Checkpoint, tried: TriedTokenizer) -> list[Line]:
    tokenizer, rows = tried.tokenizer, checkpoint.decoder.config.vocab_size
    bos, eos = tokenizer.start_id(checkpoint.bos_id), tokenizer.end_ids(checkpoint.eos_ids)
    exact = "gives text back exactly" if tried.is_exact else "does not give every text back exactly"
    adds = "added to a prompt" if tokenizer.adds_bos else "not added to a prompt"
    return [
        ("tokenizer", f"{tokenizer.kind}, {tokenizer.vocab_size} of {rows} tokens, {exact}"),
        ("BOS", "none" if bos is None else f"{tried.names((bos,))}, {adds}"),
        ("EOS", tried.names(eos)),
    ]
