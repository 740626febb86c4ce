"""The flags of python -m model.train, each with its sentence. Knows what none of them does, and no torch."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Callable, Sequence

from model.arguments import OneLineParser
from model.presets import ARCHS, PRESET_NAMES
from model.train.recipes import DTYPES, FINE_TUNING, OPTIMIZERS, recipe, told
from model.train.schedule import SHAPES
from model.train.vocabulary import KINDS

_SHAPE = ("preset", "arch", "n_layers", "width", "n_heads", "n_kv_heads", "mlp_width")
_BROUGHT = (*_SHAPE, "vocab_size", "tokenizer", "end_token")
_USUAL_PRESET = "small"
LIMITS = ("max_minutes", "epochs", "tokens", "steps")
"""Any of them says how long to train."""
AUTO = "auto"
"""The preset that depends on text, device and time."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags, with the preset's recipe where there are none. Ends the program on unknown ones."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.init and (given := [name for name in _BROUGHT if getattr(options, name) is not None]):
        named = {action.dest: action.option_strings[0] for action in parser._actions if action.option_strings}
        flags = ", ".join(named[name] for name in given)
        parser.error(f"{flags} and --init contradict one another: the model brings its shape and tokenizer")
    options.preset = options.preset or _USUAL_PRESET
    defaults = dataclasses.asdict(FINE_TUNING if options.init else recipe(options.preset))
    if any(getattr(options, name) for name in LIMITS):
        defaults["steps"] = defaults["epochs"] = None
    if (options.optimizer or defaults["optimizer"]) == "adamw":
        defaults["lr"] = defaults["lr_alone"]
    for name, value in defaults.items():
        if getattr(options, name, None) is None:
            setattr(options, name, value)
    return options


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
    p.add_argument(
        "--held-out",
        type=_small_share,
        default=0.01,
        metavar="SHARE",
        help="documents kept apart and measured (default: 0.01; of fewer than 100 documents the end of the last)",
    )
    p.add_argument(
        "--unseen", nargs="+", metavar="PATH", help="texts never trained on, each measured by itself in the end"
    )
    p.add_argument("--text-key", default="text", metavar="KEY", help="under which .jsonl has its texts (default: text)")


def _add_shape(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--init", metavar="DIR", help="go on from these weights: ours, or a Hugging Face directory with its tokenizer"
    )
    p.add_argument(
        "--preset",
        type=_preset,
        metavar="NAME",
        help=f"{', '.join(PRESET_NAMES)}, or auto: by text, device and --max-minutes (default: {_USUAL_PRESET})",
    )
    p.add_argument("--arch", choices=ARCHS, help="another layout in the size of a preset (default: the preset's)")
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
    p.add_argument("--dry-run", action="store_true", help="tell size, memory, disk and time, and write nothing")
    p.add_argument("--resume", action="store_true", help="continue the run in --out")
    p.add_argument("--overwrite", action="store_true", help="start anew although --out holds a run")
    p.add_argument("--about", metavar="FILE", help="text for the model card: corpus, licence, intended use")
    p.add_argument("--license", metavar="ID", help="of the model, for the card's head: mit, cc0-1.0, ...")
    p.add_argument("--language", metavar="CODE", help="of the text, for the card's head: en, pt-BR, ...")
    p.add_argument("--tensorboard", action="store_true", help="also write event files into OUT/tensorboard")
    p.add_argument("--report-seconds", type=_positive, default=10.0, help="time between progress lines (default: 10)")
    p.add_argument("--save-seconds", type=_positive, default=300.0, help="time between snapshots (default: 300)")


def _preset(name: str) -> str:
    names = (*PRESET_NAMES, AUTO)
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1)
    meant = f", did you mean {near[0]}?" if near else ";"
    raise argparse.ArgumentTypeError(f"no preset is called {name!r}{meant} there are {', '.join(names)}")


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
_small_share = _number(float, lambda x: 0 < x <= 0.3, "a number above 0 and up to 0.3")
_decay = _number(float, lambda x: 0 <= x < 1, "a number from 0 to below 1")
_share = _number(float, lambda x: 0 <= x <= 1, "a number from 0 to 1")
