"""The flags, the preset's recipe where there are none, and the nouns that they ask for. Knows no torch."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from model.config import ConfigError, ModelConfig
from model.presets import preset, reshaped
from model.train.data.sources import Sources
from model.train.data.vocabulary import UNKNOWN, Vocabulary
from model.train.flags import USUAL_PRESET, parser
from model.train.recipes import FINE_TUNING, recipe
from model.train.schedule import Limits

_SIZES = ("n_layers", "width", "n_heads", "n_kv_heads", "mlp_width")
_BROUGHT = ("preset", "arch", *_SIZES, "vocab_size", "tokenizer", "end_token")
LIMITS = ("max_minutes", "epochs", "tokens", "steps")
"""Any of them says how long to train."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags, with the preset's recipe where there are none. Ends the program on unknown ones."""
    flags = parser()
    options = flags.parse_args(arguments)
    if options.init and (given := [name for name in _BROUGHT if getattr(options, name) is not None]):
        named = {action.dest: action.option_strings[0] for action in flags._actions if action.option_strings}
        both = ", ".join(named[name] for name in given)
        flags.error(f"{both} and --init contradict one another: the model brings its shape and tokenizer")
    if options.warm_down is not None and options.schedule != "linear":
        flags.error(f"--warm-down is for --schedule linear; {options.schedule} knows no such end: leave it out")
    options.preset = options.preset or USUAL_PRESET
    defaults = dataclasses.asdict(FINE_TUNING if options.init else recipe(options.preset))
    if any(getattr(options, name) for name in LIMITS):
        defaults["steps"] = defaults["epochs"] = None
    if (options.optimizer or defaults["optimizer"]) == "adamw":
        if options.matrix_lr is not None:
            flags.error("--matrix-lr is the rate of --optimizer muon; adamw has --lr alone")
        defaults["lr"] = defaults["lr_alone"]
    for name, value in defaults.items():
        if getattr(options, name, None) is None:
            setattr(options, name, value)
    return options


def shape(options: argparse.Namespace) -> ModelConfig:
    """The preset with the flags' changes; how many tokens the tokenizer really has shows later. Raises ConfigError."""
    base = preset(options.preset, options.arch)
    check_sources(options, f"preset {options.preset}", has_encoder=base.n_encoder_layers > 0)
    if not any(getattr(options, name) for name in LIMITS):
        raise ConfigError("say how long to train: --max-minutes, --epochs, --tokens or --steps")
    least, what = (
        (257, "256 bytes and the end token") if options.tokenizer == "bpe" else (3, "end token and unknown word")
    )
    if options.vocab_size is not None and options.vocab_size < least:
        raise ConfigError(f"--vocab-size must be at least {least} ({what}), not {options.vocab_size}")
    if options.context is not None and options.context < 2:
        raise ConfigError(f"--context must be at least 2 tokens, not {options.context}")
    sized = reshaped(base, **{name: getattr(options, name) for name in _SIZES})
    given = {"vocab_size": options.vocab_size, "context": options.context}
    return dataclasses.replace(sized, **{k: v for k, v in given.items() if v is not None})


def vocabulary(options: argparse.Namespace) -> Vocabulary:
    """The tokenizer to be. Raises ConfigError."""
    end: str = options.end_token
    if not end or end.split() != [end] or end == UNKNOWN:
        raise ConfigError(f"--end-token must be one word other than {UNKNOWN}, not {end!r}")
    size = preset(options.preset).vocab_size if options.tokenizer == "bpe" else None
    # Whoever names a number is told where the text has no room for it; a preset's is only what it would like.
    fewer = options.vocab_size is None
    return Vocabulary(kind=options.tokenizer, size=options.vocab_size or size, end_token=end, fewer=fewer)


def limits(options: argparse.Namespace) -> Limits:
    """How long to train."""
    return Limits(steps=options.steps, epochs=options.epochs, tokens=options.tokens, minutes=options.max_minutes)


def sources(options: argparse.Namespace, names: Sequence[str]) -> Sources:
    """The texts called so, as the flags say that texts are to be read."""
    return Sources(names, text_key=options.text_key, without=Path(options.out))


def check_sources(options: argparse.Namespace, model: str, *, has_encoder: bool) -> None:
    """Whether there is something to learn from in the form that `model` reads. Raises ConfigError."""
    if has_encoder and not options.pairs:
        raise ConfigError(f"{model} has an encoder, which reads sources: use --pairs FILE.tsv")
    if options.pairs and not has_encoder:
        raise ConfigError(f"{model} has no encoder to read sources: use --data, or --preset cross")
    if options.pairs and options.data:
        raise ConfigError("--data and --pairs exclude one another: preset cross learns from --pairs")
    if not options.pairs and not options.data:
        raise ConfigError("say what to train on: --data PATH")
    if options.straighten is not None and (options.pairs or options.per_line):
        raise ConfigError("--straighten is for running text; lines and pairs are learnt as they are")
    if options.unseen and (options.pairs or options.per_line):
        raise ConfigError("--unseen is for running text; of lines and pairs --held-out keeps some apart")
    if options.pairs and options.per_line:
        raise ConfigError("--per-line goes with --data; in --pairs every line stands by itself anyway")
