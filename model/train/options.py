"""Command line of the training script: the flags, and their defaults for each preset."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from model import command_line
from model.command_line import OneLineParser, non_negative_int, non_negative_number, path, positive_int, positive_number
from model.config import ConfigError, ModelConfig
from model.presets import ARCHS, PRESET_NAMES, preset, reshaped
from model.tokenizer.tokenizer import SEPARATOR
from model.train.reporting.console import program_name
from model.train.step.schedule import SHAPES, Limits

DEFAULTS: dict[str, object] = {
    "per_line": False,
    "tokenizer": "bpe",
    "end_token": SEPARATOR,
    "held_out": 0.01,
    "preset": "small",
    "windows": 16,
    "optimizer": "muon",
    "matrix_lr": 0.02,
    "lr": 0.004,
    "weight_decay": 0.05,
    "schedule": "linear",
    "warm_up": 100,
    "warm_down": 0.4,
    "seed": 1,
    "device": "auto",
    "dtype": "auto",
    "compile": "auto",
    "report_seconds": 10.0,
    "save_seconds": 300.0,
    "ema": 0.0,
    "keep": "best",
    "export_dtype": "bfloat16",
}
_TOY_ADAMW_LR = 0.1
"""Converged with each of ten seeds."""
PROFILES: dict[str, dict[str, object]] = {
    "toy": {
        "per_line": True,
        "tokenizer": "words",
        "end_token": "<EOS>",
        "steps": 400,
        "windows": 2,
        "optimizer": "adamw",
        "export_dtype": "float32",
    },
    "cross": {"steps": 2000, "windows": 64},
    # AdamW: pretrained knowledge is in a few large directions of each matrix, and Muon changes all directions equally.
    # Fine-tuning our model, trained with Muon, on 80 kB of plays lowered held-out bits per byte from 3.040 to 1.715
    # with AdamW, 1.744 with Muon at 0.01, 2.184 at 0.002. Rate and number format depend on the model.
    "--init": {
        "epochs": 3.0,
        "windows": 8,
        "optimizer": "adamw",
        "matrix_lr": 0.01,
        "lr": None,
        "warm_up": 10,
        "export_dtype": None,
    },
}
"""Defaults of a preset, or with --init, where they differ; None if the default comes from the model."""
ADAMW_LR = 0.001
"""Default of --lr if AdamW updates all parameters: 0.004 trained poorly with post-norm (textbook, width 128)."""
_SET_BY_INIT = [
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
]
_OF_PRESET = "(default: the preset's)"


def parser() -> argparse.ArgumentParser:
    """The parser of the command line; a flag that is not given is None or False."""
    p = OneLineParser(
        prog=program_name(),
        usage=f"{program_name()} --data PATH... --out DIR --max-minutes N [FLAG...]",
        description="Train a model on text, and write a weights directory for the service.",
        allow_abbrev=False,
    )
    p.add_argument("--out", required=True, type=path, metavar="DIR", help="where the weights directory goes")
    _add_data_flags(p.add_argument_group("training data"))
    _add_model_flags(p.add_argument_group("the model"))
    _add_training_flags(p.add_argument_group("how long"), p.add_argument_group("how to train"))
    _add_run_flags(p.add_argument_group("the run"), p.add_argument_group("the result"))
    for action in p._actions:
        shown = {"": DEFAULTS.get(action.dest)} | {name: own.get(action.dest) for name, own in PROFILES.items()}
        texts = [
            f"{name}: {_format(value)}" if name else _format(value)
            for name, value in shown.items()
            if value is not None
        ]
        if texts:
            action.help = f"{action.help} (default: {'; '.join(texts)})"
    return p


def _add_data_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    kinds = ".txt, .text, .md, .markdown, .jsonl, .ndjson, each also .gz: files, folders, patterns, or - (stdin)"
    add("--data", nargs="+", type=path, metavar="PATH", help=kinds)
    add(
        "--pairs", nargs="+", type=path, metavar="FILE.tsv", help="source<TAB>target lines, for presets with an encoder"
    )
    add("--per-line", action=argparse.BooleanOptionalAction, help="every line is a text by itself")
    add("--tokenizer", choices=("bpe", "words"), help="what tokens are")
    add("--end-token", metavar="TEXT", help="the special token that ends a text")
    size = "tokens of the vocabulary (default: the preset's, fewer if the text supports no more; words: all)"
    add("--vocab-size", type=command_line.vocabulary_size, metavar="N", help=size)
    quotes = "texts given ASCII quotes (default: 0.5; --init: 0)"
    add("--straighten", type=command_line.fraction, metavar="SHARE", help=quotes)
    share = "documents kept apart and measured, of fewer than 100 the last 5 %% of all text"
    add("--held-out", type=command_line.small_fraction, metavar="SHARE", help=share)
    unseen = "texts never trained on, each measured by itself in the end"
    add("--unseen", nargs="+", type=path, metavar="PATH", help=unseen)
    add("--text-key", metavar="KEY", help="key of the texts in .jsonl (default: text)")


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    names = f"{', '.join(PRESET_NAMES)}, or auto: by text, device and --max-minutes"
    add("--preset", type=command_line.preset_name, metavar="NAME", help=names)
    add("--arch", choices=ARCHS, help=f"another layout in the size of a preset {_OF_PRESET}")
    init = "start from these weights: ours, a Hugging Face directory with its tokenizer, a GGUF file, or org/name of "
    init += "the Hub (org/name:Q4_K_M for a GGUF file there)"
    add("--init", type=path, metavar="DIR", help=init)
    context = f"longest sequence in tokens {_OF_PRESET}; with --init of training (default: up to 512)"
    add("--context", type=positive_int, metavar="N", help=context)
    add("--layers", type=positive_int, metavar="N", help=f"blocks of the decoder, and of an encoder {_OF_PRESET}")
    width = f"size of the residual stream; the feed-forward follows {_OF_PRESET}"
    add("--width", type=positive_int, metavar="N", help=width)
    add("--heads", type=positive_int, metavar="N", help=f"query heads; they share the width {_OF_PRESET}")
    add("--kv-heads", type=positive_int, metavar="N", help=f"key and value heads {_OF_PRESET}")
    add("--mlp-width", type=positive_int, metavar="N", help=f"hidden size of the feed-forward {_OF_PRESET}")


def _add_training_flags(length: argparse._ArgumentGroup, how: argparse._ArgumentGroup) -> None:
    minutes = "train this long; the learning rate follows"
    length.add_argument("--max-minutes", type=positive_number, metavar="N", help=minutes)
    length.add_argument("--epochs", type=positive_number, metavar="N", help="train this many times over the text")
    length.add_argument("--tokens", type=positive_int, metavar="N", help="train on this many tokens")
    length.add_argument("--steps", type=positive_int, metavar="N", help="train this many steps")
    add = how.add_argument
    add("--windows", type=command_line.windows, metavar="N", help="windows, lines or pairs a step")
    micro = "how many of them at once (default: on a CPU about 2,048 tokens, else what fits)"
    add("--micro-windows", type=positive_int, metavar="N", help=micro)
    add("--optimizer", choices=command_line.OPTIMIZERS, help="of the blocks' matrices")
    add("--matrix-lr", type=positive_number, metavar="RATE", help="learning rate of Muon")
    rate = f"learning rate of AdamW; alone {ADAMW_LR}, toy {_TOY_ADAMW_LR}, --init 4 / width^1.5"
    add("--lr", type=positive_number, metavar="RATE", help=rate)
    add("--weight-decay", type=non_negative_number, metavar="SHARE", help="of the matrices")
    add("--schedule", choices=SHAPES, help="how the learning rate falls")
    add("--warm-up", type=non_negative_int, metavar="STEPS", help="until it is whole")
    warm_down = "of a linear schedule: share of the run over which it falls to 0"
    add("--warm-down", type=command_line.fraction, metavar="SHARE", help=warm_down)
    add("--seed", type=non_negative_int, metavar="N", help="of the weights and the order")


def _add_run_flags(run: argparse._ArgumentGroup, result: argparse._ArgumentGroup) -> None:
    add = run.add_argument
    add("--dry-run", action="store_true", help="print size, memory, disk and time, and write nothing")
    add("--resume", action="store_true", help="continue the run in --out")
    add("--overwrite", action="store_true", help="start over although --out holds a run or a model")
    add("--device", choices=("auto", "cpu", "cuda"), help="auto: a GPU where one is")
    dtypes = "of the computation; auto: bfloat16 where the device has it"
    add("--dtype", choices=("auto", "float32", "bfloat16"), help=dtypes)
    add("--compile", choices=("auto", "on", "off"), help="the step by torch.compile; auto: on a GPU where Triton is")
    add("--report-seconds", type=positive_number, metavar="N", help="between progress lines")
    add("--save-seconds", type=positive_number, metavar="N", help="between snapshots")
    prompt = "what samples continue; may be repeated (default: openings of held-out documents)"
    add("--sample-prompt", action="append", metavar="TEXT", help=prompt)
    add("--tensorboard", action="store_true", help="also write event files into OUT/tensorboard")
    add = result.add_argument
    add("--ema", type=command_line.decay, metavar="DECAY", help="export an average of the weights; 0 is off")
    add("--keep", choices=("best", "last"), help="which held-out measurement's weights")
    add("--export-dtype", choices=command_line.DTYPES, help="of the weights written; --init: as they were")
    name = "of the model; clients of the service know it by this (default: its directory's)"
    add("--name", type=command_line.model_name, metavar="NAME", help=name)
    add("--about", type=path, metavar="FILE", help="text for the model card: corpus, license, intended use")
    license_id = "of the model, for the card's head: mit, cc0-1.0, ..."
    add("--license", type=command_line.license_id, metavar="ID", help=license_id)
    language = "of the text, for the card's head: en, pt-BR, ..."
    add("--language", type=command_line.language, metavar="CODE", help=language)


def _format(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the flags and applies the preset's defaults. Exits the program on invalid flags."""
    flags = parser()
    options = flags.parse_args(arguments)
    given = {name for name, value in vars(options).items() if value is not None}
    if options.init and (conflicting := [name for name in _SET_BY_INIT if name in given]):
        both = ", ".join(map(_flag, conflicting))
        flags.error(f"{both} cannot be combined with --init: the model defines its shape and tokenizer")
    if options.resume and options.overwrite:
        flags.error("--resume cannot be combined with --overwrite: continue the run, or start over")
    if options.warm_down is not None and options.schedule not in (None, "linear"):
        flags.error(f"--warm-down needs --schedule linear, not {options.schedule}: omit it")
    profile = "--init" if options.init else options.preset
    defaults = DEFAULTS | PROFILES.get(profile, {})
    if limits(options).flags():
        defaults = {name: value for name, value in defaults.items() if name not in ("steps", "epochs")}
    for name in defaults.keys() - given:
        setattr(options, name, defaults[name])
    if options.optimizer == "adamw":
        if "matrix_lr" in given:
            flags.error("--matrix-lr needs --optimizer muon; adamw uses only --lr")
        if "lr" not in given and not options.init:
            options.lr = _TOY_ADAMW_LR if profile == "toy" else ADAMW_LR
    options.greedy = profile in ("toy", "cross")  # a single answer is right, so the service samples greedily
    # The first token of a line is predicted from an end token, except in the notebook of preset toy.
    options.lines_from_end = profile != "toy"
    return options


def flag_values(options: argparse.Namespace, names: Sequence[str]) -> dict[str, str]:
    """Flag -> value of these options, for comparison with a resuming run's."""
    return {_flag(name): str(getattr(options, name)) for name in names}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def shape(options: argparse.Namespace) -> ModelConfig:
    """The preset with the flags applied; training the tokenizer may reduce vocab_size later. Raises ConfigError."""
    base = preset(options.preset, options.arch)
    check_sources(options, f"preset {options.preset}", has_encoder=base.n_encoder_layers > 0)
    if not limits(options).flags():
        raise ConfigError("the length of the run is missing: --max-minutes, --epochs, --tokens or --steps")
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


def limits(options: argparse.Namespace) -> Limits:
    """Length of the run."""
    return Limits(steps=options.steps, epochs=options.epochs, tokens=options.tokens, minutes=options.max_minutes)


def check_sources(options: argparse.Namespace, model: str, *, has_encoder: bool) -> None:
    """Checks that the data flags suit the model. Raises ConfigError."""
    is_running_text = not (options.pairs or options.per_line)
    wrong = {
        f"{model} has an encoder, which reads sources: use --pairs FILE.tsv": has_encoder and not options.pairs,
        f"{model} has no encoder to read sources: use --data, or --preset cross": options.pairs and not has_encoder,
        "--data cannot be combined with --pairs: preset cross trains on --pairs": options.pairs and options.data,
        "the training data is missing: --data PATH": not options.pairs and not options.data,
        "--sample-prompt needs running text; lines and pairs are sampled by themselves: omit it": options.sample_prompt
        and not is_running_text,
        "--sample-prompt is empty; give the start of a text": not all(map(str.strip, options.sample_prompt or [])),
        "--straighten needs running text; lines and pairs are not changed: omit it": options.straighten is not None
        and not is_running_text,
        "--unseen needs running text; use --held-out for lines and pairs": options.unseen and not is_running_text,
        "--per-line needs --data; lines of --pairs are always independent: omit it": options.pairs and options.per_line,
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(message)
