"""The flags of python -m model.train, each with its sentence and its default. Knows not what they do, and no torch."""

from __future__ import annotations

import argparse

from model.arguments import OneLineParser
from model.presets import ARCHS, PRESET_NAMES
from model.train.data.vocabulary import KINDS
from model.train.recipes import DTYPES, OPTIMIZERS, told
from model.train.schedule import SHAPES
from model.train.values import count, decay, not_negative, positive, preset_name, share, small_share, whole, windows

USUAL_PRESET = "small"


def parser() -> argparse.ArgumentParser:
    """Of the whole command line."""
    p = OneLineParser(
        prog="python -m model.train",
        usage="python -m model.train --data PATH... --out DIR --max-minutes N [FLAG...]",
        description="Train a model on text, and leave a directory that serves.",
        allow_abbrev=False,
    )
    p.add_argument("--out", required=True, metavar="DIR", help="where the weights directory goes")
    groups = {
        "what to learn from": _add_data,
        "the model": _add_shape,
        "how long": _add_length,
        "how it learns": _add_learning,
        "the run": _add_run,
        "the result": _add_result,
    }
    for title, add in groups.items():
        add(p.add_argument_group(title))
    return p


def _add_data(p: argparse._ArgumentGroup) -> None:
    p.add_argument(
        "--data",
        nargs="+",
        metavar="PATH",
        help=".txt, .md, .jsonl, each also .gz: files, folders, patterns, or - (stdin)",
    )
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
        metavar="N",
        type=count,
        help="tokens of the vocabulary (default: the preset's, fewer where the text supports no more; words: all)",
    )
    p.add_argument(
        "--straighten", metavar="SHARE", type=share, help="texts given ASCII quotes (default: 0.5; --init: 0)"
    )
    p.add_argument(
        "--held-out",
        type=small_share,
        default=0.01,
        metavar="SHARE",
        help="documents kept apart and measured (default: 0.01; of fewer than 100 the last 5 %% of all text)",
    )
    p.add_argument(
        "--unseen", nargs="+", metavar="PATH", help="texts never trained on, each measured by itself in the end"
    )
    p.add_argument("--text-key", default="text", metavar="KEY", help="under which .jsonl has its texts (default: text)")


def _add_shape(p: argparse._ArgumentGroup) -> None:
    p.add_argument(
        "--preset",
        type=preset_name,
        metavar="NAME",
        help=f"{', '.join(PRESET_NAMES)}, or auto: by text, device and --max-minutes (default: {USUAL_PRESET})",
    )
    p.add_argument("--arch", choices=ARCHS, help="another layout in the size of a preset (default: the preset's)")
    p.add_argument(
        "--init", metavar="DIR", help="go on from these weights: ours, or a Hugging Face directory with its tokenizer"
    )
    p.add_argument(
        "--context",
        metavar="N",
        type=count,
        help="longest sequence in tokens (default: the preset's); with --init of training (default: up to 512)",
    )
    sizes = {
        "--layers": ("n_layers", "blocks; of an encoder as many"),
        "--width": ("width", "size of the residual stream; the feed-forward follows"),
        "--heads": ("n_heads", "query heads; they share the width"),
        "--kv-heads": ("n_kv_heads", "key and value heads"),
        "--mlp-width": ("mlp_width", "hidden size of the feed-forward"),
    }
    for flag, (name, meaning) in sizes.items():
        p.add_argument(flag, dest=name, metavar="N", type=count, help=f"{meaning} (default: the preset's)")


def _add_length(p: argparse._ArgumentGroup) -> None:
    p.add_argument("--max-minutes", metavar="N", type=positive, help="train this long; the learning rate follows")
    p.add_argument(
        "--epochs", metavar="N", type=positive, help="train this many times over the text (default with --init: 3)"
    )
    p.add_argument("--tokens", metavar="N", type=count, help="train on this many tokens")
    p.add_argument("--steps", metavar="N", type=count, help=f"train this many steps (default: {told('steps')})")


def _add_learning(p: argparse._ArgumentGroup) -> None:
    p.add_argument(
        "--windows",
        metavar="N",
        type=windows,
        help=f"windows, lines or pairs a step (default: {told('windows')}; --init: 8)",
    )
    p.add_argument(
        "--micro-windows",
        metavar="N",
        type=count,
        help="how many of them at once (default: on a CPU about 2,048 tokens, else what fits)",
    )
    p.add_argument(
        "--optimizer", choices=OPTIMIZERS, help=f"of the blocks' matrices (default: {told('optimizer')}; --init: adamw)"
    )
    p.add_argument(
        "--matrix-lr",
        metavar="RATE",
        type=positive,
        help=f"learning rate of Muon (default: {told('matrix_lr')}; --init: 0.01)",
    )
    p.add_argument(
        "--lr",
        metavar="RATE",
        type=positive,
        help=f"learning rate of AdamW (default: {told('lr')}; alone {told('lr_alone')}; --init: 4 / width^1.5)",
    )
    p.add_argument(
        "--weight-decay", metavar="SHARE", type=not_negative, default=0.05, help="of the matrices (default: 0.05)"
    )
    p.add_argument("--schedule", choices=SHAPES, default="linear", help="how the learning rate falls (default: linear)")
    p.add_argument("--warm-up", metavar="STEPS", type=whole, help="until it is whole (default: 100; --init: 10)")
    p.add_argument(
        "--warm-down",
        metavar="SHARE",
        type=share,
        help=f"of a linear schedule: share of the run over which it falls to 0 (default: {told('warm_down')})",
    )
    p.add_argument("--seed", metavar="N", type=whole, default=1, help="of the weights and the order (default: 1)")


def _add_run(p: argparse._ArgumentGroup) -> None:
    p.add_argument("--dry-run", action="store_true", help="tell size, memory, disk and time, and write nothing")
    again = p.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="continue the run in --out")
    again.add_argument("--overwrite", action="store_true", help="start anew although --out holds a run or a model")
    p.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU where one is (default: auto)"
    )
    p.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of the computation; auto: bfloat16 where the device has it (default: auto)",
    )
    p.add_argument(
        "--report-seconds", metavar="N", type=positive, default=10.0, help="between progress lines (default: 10)"
    )
    p.add_argument("--save-seconds", metavar="N", type=positive, default=300.0, help="between snapshots (default: 300)")
    p.add_argument("--tensorboard", action="store_true", help="also write event files into OUT/tensorboard")


def _add_result(p: argparse._ArgumentGroup) -> None:
    p.add_argument(
        "--ema", metavar="DECAY", type=decay, default=0.0, help="export an average of the weights (default: 0, off)"
    )
    p.add_argument(
        "--keep", choices=("best", "last"), default="best", help="which held-out measurement's weights (default: best)"
    )
    p.add_argument(
        "--export-dtype",
        choices=DTYPES,
        help=f"of the weights written (default: {told('export_dtype')}; --init: as they were)",
    )
    p.add_argument("--about", metavar="FILE", help="text for the model card: corpus, licence, intended use")
    p.add_argument("--license", metavar="ID", help="of the model, for the card's head: mit, cc0-1.0, ...")
    p.add_argument("--language", metavar="CODE", help="of the text, for the card's head: en, pt-BR, ...")
