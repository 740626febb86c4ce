"""--preset auto: the largest size that the text feeds and the time reaches. Knows no training loop."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from model.config import ConfigError, ModelConfig
from model.describe import describe_size
from model.device import choose_device
from model.files import write_file
from model.presets import SIZES
from model.train.data.text_file import STANDARD_INPUT
from model.train.options import limits, shape, vocabulary
from model.train.plan.amount import Texts, read_texts
from model.train.plan.speed import measure
from model.train.values import AUTO
from model.transformer import Decoder

_PER_PARAMETER = 5
"""Tokens that a parameter should at least see. 20 make the most of an amount of computing (arXiv:2203.15556), but a
little too large costs less than a little too small: `small` was at 1.46 held-out bits per byte after 2 of them."""
_EPOCHS = 8
"""How often a text is worth reading: 4 times are as good as new text, 16 teach little more (arXiv:2305.16264)."""
_CHOICE = "preset"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A size and why."""

    preset: str
    reason: str


def settle_size(options: argparse.Namespace, *, follows: bool = False) -> None:
    """Puts a size in the place of auto, and says which; of a run that goes on the one that it has.

    follows: take what another process of this run has chosen. Raises ConfigError, DataError and TokenizerError.
    """
    if options.preset != AUTO:
        return
    kept = Path(options.out) / ".training" / _CHOICE
    if (options.resume or follows) and kept.exists():
        options.preset = kept.read_text().strip()
        return
    _check(options)
    choice = choose(options, read_texts(options))
    options.preset = choice.preset
    print(f"--preset auto takes {choice.preset}: {choice.reason}", flush=True)
    if not options.dry_run:
        write_file(kept, f"{choice.preset}\n".encode())


def choose(options: argparse.Namespace, texts: Texts) -> Choice:
    """From small to large, as long as every parameter would see enough tokens."""
    chosen, why = SIZES[0], "the smallest there is"
    for name in SIZES:
        asked = argparse.Namespace(**{**vars(options), "preset": name})
        config, once = shape(asked), texts.n_bytes / texts.tokenised(vocabulary(asked))[0]
        with torch.device("meta"):
            n_params = Decoder(config).n_params
        amounts = {f"{_EPOCHS} epochs of this text": _EPOCHS * once, "this run": _length(asked, config, once)}
        for whence, most in amounts.items():
            if most < _PER_PARAMETER * n_params:
                wanted = f"{name} wants {_millions(_PER_PARAMETER * n_params)} tokens or more"
                return Choice(preset=chosen, reason=f"{why}; {wanted}, {whence} has {_millions(most)}")
        chosen, why = name, f"{describe_size(n_params)} parameters, each to see {_PER_PARAMETER} tokens or more"
    return Choice(preset=chosen, reason=f"{why}; the largest there is")


def _check(options: argparse.Namespace) -> None:
    """What is wrong with the other flags is told before the text is read."""
    if options.pairs or options.per_line:
        raise ConfigError("--preset auto is for running text; name a preset for lines and pairs")
    if str(STANDARD_INPUT) in (options.data or []):
        raise ConfigError("--preset auto reads the text before it chooses, and - can be read but once; name a preset")
    shape(argparse.Namespace(**{**vars(options), "preset": SIZES[0]}))


def _length(options: argparse.Namespace, config: ModelConfig, once: float) -> float:
    """Tokens of the whole run, as its limits have it. once: tokens of the text."""
    step: int = options.windows * config.context
    seconds = 0.0
    if options.max_minutes:
        speed = measure(config, options, choose_device(options.device), config.context)
        seconds = speed.step_seconds(options.windows)
    return step / limits(options).done(step=1, epochs=step / once, tokens=step, seconds=seconds)


def _millions(n: float) -> str:
    return f"{n / 1e6:.1f} M"
