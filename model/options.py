"""The flags of python -m model.train, each with its sentence. Knows no torch."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

from model.config import ConfigError, ModelConfig
from model.presets import PRESET_NAMES, preset


def parser() -> argparse.ArgumentParser:
    """--data and --out are required; everything else has a default that works."""
    p = argparse.ArgumentParser(prog="python -m model.train", description="Train a model on text.", allow_abbrev=False)
    p.add_argument("--data", nargs="+", required=True, metavar="PATH", help="files, folders, patterns, or - for stdin")
    p.add_argument("--out", required=True, metavar="DIR", help="where the weights directory goes")
    p.add_argument("--preset", choices=PRESET_NAMES, default="small", help="shape of the model (default: small)")
    p.add_argument("--vocab-size", type=_count, help="tokens of the vocabulary (default: the preset's)")
    p.add_argument("--context", type=_count, help="longest sequence in tokens (default: the preset's)")
    p.add_argument("--max-minutes", type=_positive, help="train this long; the learning rate follows")
    p.add_argument("--epochs", type=_positive, help="train this many times over the text")
    p.add_argument("--tokens", type=_count, help="train on this many tokens")
    p.add_argument("--steps", type=_count, help="train this many steps")
    p.add_argument("--windows", type=_count, default=16, help="windows of `context` tokens a step (default: 16)")
    p.add_argument("--micro-windows", type=_count, default=2, help="windows computed at once (default: 2)")
    p.add_argument("--matrix-lr", type=_positive, default=0.02, help="learning rate of Muon (default: 0.02)")
    p.add_argument("--lr", type=_positive, default=0.004, help="learning rate of AdamW (default: 0.004)")
    p.add_argument("--weight-decay", type=_not_negative, default=0.05, help="of the matrices (default: 0.05)")
    p.add_argument("--straighten", type=_share, default=0.5, help="share of texts given ASCII quotes (default: 0.5)")
    p.add_argument("--seed", type=_whole, default=1, help="of the weights and of the order (default: 1)")
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    p.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of the computation")
    p.add_argument("--export-dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the weights written")
    p.add_argument("--resume", action="store_true", help="continue the run in --out")
    p.add_argument("--overwrite", action="store_true", help="start anew although --out holds a run")
    p.add_argument("--about", metavar="FILE", help="text for the model card: corpus, licence, intended use")
    p.add_argument("--report-seconds", type=_positive, default=10.0, help="time between progress lines (default: 10)")
    p.add_argument("--save-seconds", type=_positive, default=300.0, help="time between snapshots (default: 300)")
    return p


def shape(options: argparse.Namespace) -> ModelConfig:
    """The preset with the flags' changes. Raises ConfigError."""
    if not any((options.max_minutes, options.epochs, options.tokens, options.steps)):
        raise ConfigError("say how long to train: --max-minutes, --epochs, --tokens or --steps")
    if options.vocab_size is not None and options.vocab_size < 257:
        raise ConfigError(f"--vocab-size must be at least 257 (256 bytes and the separator), not {options.vocab_size}")
    if options.context is not None and options.context < 8:
        raise ConfigError(f"--context must be at least 8 tokens, not {options.context}")
    given = {"vocab_size": options.vocab_size, "context": options.context}
    return dataclasses.replace(preset(options.preset), **{k: v for k, v in given.items() if v is not None})


def _number(kind: Callable[[str], float], allowed: Callable[[float], bool], what: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")
        if not allowed(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse


_count = _number(int, lambda x: x >= 1, "a whole number of at least 1")
_whole = _number(int, lambda x: 0 <= x < 2**63, "a whole number from 0 to 2^63 - 1")
_positive = _number(float, lambda x: 0 < x < float("inf"), "a number above 0")
_not_negative = _number(float, lambda x: 0 <= x < float("inf"), "a number of at least 0")
_share = _number(float, lambda x: 0 <= x <= 1, "a number from 0 to 1")
