"""The flags of python -m model.train, each with its sentence, and what they make of a preset. Knows no torch."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence

from model.arguments import OneLineParser
from model.config import ConfigError, ModelConfig
from model.presets import PRESET_NAMES, preset, reshaped
from model.train.recipes import DTYPES, FINE_TUNING, OPTIMIZERS, recipe, told
from model.train.schedule import SHAPES
from model.train.vocabulary import KINDS, Vocabulary
from model.train.word_tokenizer import UNKNOWN

_LIMITS = ("max_minutes", "epochs", "tokens", "steps")
_SIZES = ("n_layers", "width", "n_heads", "n_kv_heads", "mlp_width")
_BROUGHT = ("preset", "arch", *_SIZES, "vocab_size", "tokenizer", "end_token")
_USUAL_PRESET = "small"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags, with the preset's recipe where there are none. Ends the program on unknown ones."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.init and (given := [n for n in _BROUGHT if getattr(options, n, None) is not None]):
        named = {action.dest: action.option_strings[0] for action in parser._actions if action.option_strings}
        flags = [named[name] for name in given]
        parser.error(f"{', '.join(flags)} and --init contradict one another: the model brings its shape and tokenizer")
    options.preset = options.preset or _USUAL_PRESET
    defaults = dataclasses.asdict(FINE_TUNING if options.init else recipe(options.preset))
    if any(getattr(options, name) for name in _LIMITS):
        defaults["steps"] = defaults["epochs"] = None
    if (options.optimizer or defaults["optimizer"]) == "adamw":
        defaults["lr"] = defaults["lr_alone"]
    for name, value in defaults.items():
        if getattr(options, name, None) is None:
            setattr(options, name, value)
    return options


def shape(options: argparse.Namespace) -> ModelConfig:
    """The preset with the flags' changes; how many tokens a tokenizer of words has shows later. Raises ConfigError."""
    base = preset(options.preset)
    check_sources(options, f"preset {options.preset}", has_encoder=base.n_encoder_layers > 0)
    if not any(getattr(options, name) for name in _LIMITS):
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
    short = options.vocab_size is None and bool(options.pairs or options.per_line)
    return Vocabulary(kind=options.tokenizer, size=options.vocab_size or size, end_token=end, fewer=short)


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
    if options.pairs and options.per_line:
        raise ConfigError("--per-line goes with --data; in --pairs every line stands by itself anyway")


def _parser() -> argparse.ArgumentParser:
    p = OneLineParser(prog="python -m model.train", description="Train a model on text.", allow_abbrev=False)
    p.add_argument("--out", required=True, metavar="DIR", help="where the weights directory goes")
    for group in (_add_data, _add_shape, _add_schedule, _add_machine):
        group(p)
    return p


def _add_data(p: argparse.ArgumentParser) -> None:
    p.add_argument("--data", nargs="+", metavar="PATH", help="files, folders, patterns, or - for stdin")
    p.add_argument(
        "--pairs", nargs="+", metavar="FILE.tsv", help="source<TAB>target lines, for presets with an encoder"
    )
    p.add_argument(
        "--per-line",
        action=argparse.BooleanOptionalAction,
        help=f"every line is a text by itself (default: {told('per_line')})",
    )
    p.add_argument("--tokenizer", choices=KINDS, help=f"what tokens are (default: {told('tokenizer')})")
    p.add_argument(
        "--end-token", metavar="TEXT", help=f"the special token that ends a text (default: {told('end_token')})"
    )
    p.add_argument(
        "--vocab-size",
        type=_count,
        help="tokens of the vocabulary (default: the preset's, of lines and pairs at most; words: all)",
    )
    p.add_argument("--straighten", type=_share, help="share of texts given ASCII quotes (default: 0.5)")


def _add_shape(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--init", metavar="DIR", help="go on from these weights: ours, or a Hugging Face directory with its tokenizer"
    )
    p.add_argument("--preset", choices=PRESET_NAMES, help=f"shape of the model (default: {_USUAL_PRESET})")
    p.add_argument(
        "--context",
        type=_count,
        help="longest sequence in tokens (default: the preset's); with --init of training (default: up to 512)",
    )
    p.add_argument("--layers", dest="n_layers", metavar="N", type=_count, help="blocks; of an encoder as many")
    p.add_argument("--width", type=_count, help="size of the residual stream; the feed-forward follows")
    p.add_argument("--heads", dest="n_heads", metavar="N", type=_count, help="query heads; they share the width")
    p.add_argument("--kv-heads", dest="n_kv_heads", metavar="N", type=_count, help="key and value heads")
    p.add_argument("--mlp-width", type=_count, help="hidden size of the feed-forward")


def _add_schedule(p: argparse.ArgumentParser) -> None:
    p.add_argument("--max-minutes", type=_positive, help="train this long; the learning rate follows")
    p.add_argument("--epochs", type=_positive, help="train this many times over the text (default with --init: 3)")
    p.add_argument("--tokens", type=_count, help="train on this many tokens")
    p.add_argument("--steps", type=_count, help=f"train this many steps (default: {told('steps')})")
    p.add_argument(
        "--windows", type=_count, help=f"windows, lines or pairs a step (default: {told('windows')}; --init: 8)"
    )
    p.add_argument("--micro-windows", type=_count, help="how many of them at once (default: about 1,024 tokens)")
    p.add_argument(
        "--optimizer", choices=OPTIMIZERS, help=f"of the blocks' matrices (default: {told('optimizer')}; --init: adamw)"
    )
    p.add_argument(
        "--matrix-lr", type=_positive, help=f"learning rate of Muon (default: {told('matrix_lr')}; --init: 0.002)"
    )
    p.add_argument(
        "--lr",
        type=_positive,
        help=f"learning rate of AdamW (default: {told('lr')}; alone {told('lr_alone')}; --init: 0.05 / width)",
    )
    p.add_argument("--weight-decay", type=_not_negative, default=0.05, help="of the matrices (default: 0.05)")
    p.add_argument(
        "--schedule",
        choices=SHAPES,
        default="linear",
        help="how the learning rate falls (default: linear)",
    )
    p.add_argument("--warm-up", metavar="STEPS", type=_whole, help="until it is whole (default: 100; --init: 10)")
    p.add_argument(
        "--warm-down",
        metavar="SHARE",
        type=_share,
        default=0.4,
        help="of a linear schedule: share of the run over which it falls to 0 (default: 0.4)",
    )
    p.add_argument(
        "--ema", metavar="DECAY", type=_decay, default=0.0, help="export an average of the weights (default: 0, off)"
    )
    p.add_argument(
        "--keep", choices=("best", "last"), default="best", help="which held-out measurement's weights (default: best)"
    )
    p.add_argument("--seed", type=_whole, default=1, help="of the weights and of the order (default: 1)")


def _add_machine(p: argparse.ArgumentParser) -> None:
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    p.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of the computation")
    p.add_argument(
        "--export-dtype",
        choices=DTYPES,
        help=f"of the weights written (default: {told('export_dtype')}; --init: as they were)",
    )
    p.add_argument("--resume", action="store_true", help="continue the run in --out")
    p.add_argument("--overwrite", action="store_true", help="start anew although --out holds a run")
    p.add_argument("--about", metavar="FILE", help="text for the model card: corpus, licence, intended use")
    p.add_argument("--report-seconds", type=_positive, default=10.0, help="time between progress lines (default: 10)")
    p.add_argument("--save-seconds", type=_positive, default=300.0, help="time between snapshots (default: 300)")


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
_decay = _number(float, lambda x: 0 <= x < 1, "a number from 0 to below 1")
_share = _number(float, lambda x: 0 <= x <= 1, "a number from 0 to 1")
