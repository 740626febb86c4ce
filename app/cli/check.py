"""python -m app check DIR: does this weights directory load? Prints its facts without serving."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from app.engine.defaults import sampling_defaults
from model.checkpoint import load
from model.tokenizer import Tokenizer, TokenizerError


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 fine, 2 not; one line then names the file and the reason."""
    parser = argparse.ArgumentParser(prog="inkstream check", description="Validate a weights directory.")
    parser.add_argument("directory", type=Path, metavar="DIR")
    directory: Path = parser.parse_args(argv).directory
    try:
        checkpoint = load(directory, device=torch.device("cpu"), dtype=torch.float32)
        tokenizer = Tokenizer.load(directory)
        if tokenizer.vocab_size > checkpoint.decoder.config.vocab_size:
            raise TokenizerError(f"{directory}: the tokenizer has more tokens than the model's vocabulary")
        defaults = sampling_defaults(checkpoint.generation)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    config, n_params = checkpoint.decoder.config, checkpoint.decoder.n_params
    print(f"{directory}: loads")
    print(f"  parameters   {n_params / 1e6:.2f} M: {n_params * 4 >> 20} MiB float32, ", end="")
    print(f"{n_params * 2 >> 20} MiB bfloat16")
    print(
        f"  shape        {config.n_layers} layers x {config.width}, {config.n_heads}/{config.n_kv_heads} heads of ",
        end="",
    )
    print(f"{config.head_dim}, feed-forward {config.mlp_width}, context {config.context}")
    print(f"  tokenizer    {tokenizer.vocab_size} of {config.vocab_size} tokens, end of text {checkpoint.eos_ids}")
    print(f"  defaults     {defaults or 'none'}")
    print(f"  version      {checkpoint.version}")
    return 0
