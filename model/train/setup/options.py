"""The flags, the preset's defaults where there are none, and the nouns that they ask for. Knows no torch."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from model.config import ConfigError, ModelConfig
from model.presets import preset, reshaped
from model.train.data.sources import USUAL_KEY, Sources
from model.train.data.text_file import suffix
from model.train.data.vocabulary import UNKNOWN, Vocabulary
from model.train.setup.flags import FLAGS, RATE_ALONE, TOY_RATE_ALONE, parser
from model.train.step.schedule import Limits

_BROUGHT = (
    "preset",
    "arch",
    "layers",
    "width",
    "heads",
    "kv_heads",
    "mlp_width",
    "vocab_size",
    "tokenizer",
    "end_token",
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags, with the preset's defaults where there are none. Ends the program on wrong ones."""
    flags = parser()
    options = flags.parse_args(arguments)
    if options.init and (brought := [name for name in _BROUGHT if getattr(options, name) is not None]):
        both = ", ".join(f"--{name.replace('_', '-')}" for name in brought)
        flags.error(f"{both} and --init contradict one another: the model brings its shape and tokenizer")
    if options.resume and options.overwrite:
        flags.error("--resume and --overwrite contradict one another: continue the run, or start anew")
    if options.warm_down is not None and options.schedule not in (None, "linear"):
        flags.error(f"--warm-down is for --schedule linear; {options.schedule} knows no such end: leave it out")
    given, whose = argparse.Namespace(**vars(options)), "--init" if options.init else options.preset
    for flag in (flag for rows in FLAGS.values() for flag in rows):
        is_limited = flag.option in ("steps", "epochs") and limits(given).flags()
        if getattr(given, flag.option) is None and not is_limited:
            setattr(options, flag.option, flag.own.get(whose, flag.default))
    if options.optimizer == "adamw":
        if given.matrix_lr is not None:
            flags.error("--matrix-lr is the rate of --optimizer muon; adamw has --lr alone")
        if given.lr is None and not options.init:
            options.lr = TOY_RATE_ALONE if options.preset == "toy" else RATE_ALONE
    options.greedy = whose in ("toy", "cross")  # one answer is right, so serving takes the likeliest token
    options.lines_from_end = whose != "toy"  # a line's first token is told from an end token; in the toy's notebook not
    return options


def shape(options: argparse.Namespace) -> ModelConfig:
    """The preset with the flags' changes; how many tokens the tokenizer really has shows later. Raises ConfigError."""
    base = preset(options.preset, options.arch)
    check_sources(options, f"preset {options.preset}", has_encoder=base.n_encoder_layers > 0)
    if not limits(options).flags():
        raise ConfigError("say how long to train: --max-minutes, --epochs, --tokens or --steps")
    of_kind = {"bpe": (257, "256 bytes and the end token"), "words": (3, "end token and unknown word")}
    least, what = of_kind[options.tokenizer]
    if options.vocab_size is not None and options.vocab_size < least:
        raise ConfigError(f"--vocab-size must be at least {least} ({what}), not {options.vocab_size}")
    if options.context is not None and options.context < 2:
        raise ConfigError(f"--context must be at least 2 tokens, not {options.context}")
    sized = reshaped(
        base,
        n_layers=options.layers,
        width=options.width,
        n_heads=options.heads,
        n_kv_heads=options.kv_heads,
        mlp_width=options.mlp_width,
    )
    return dataclasses.replace(
        sized, vocab_size=options.vocab_size or sized.vocab_size, context=options.context or sized.context
    )


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
    """The texts called so, as the flags say that texts are to be read. Raises ConfigError and DataError."""
    out = Path(options.out)
    if options.text_key is not None:
        found = Sources([*(options.pairs or options.data), *(options.unseen or [])], without=out).paths()
        if not any(suffix(path) == ".jsonl" for path in found):
            raise ConfigError("--text-key is for .jsonl files, and there is none among the data: leave it out")
    return Sources(names, text_key=options.text_key or USUAL_KEY, without=out)


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
