"""Command line of the training script: one table of flags, the defaults of presets, and their parsed settings."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model import command_line
from model.command_line import OneLineParser
from model.config import ConfigError, ModelConfig
from model.presets import ARCHS, PRESET_NAMES, preset, reshaped
from model.tokenizer.tokenizer import SEPARATOR
from model.train.common.console import program_name
from model.train.data.sources import DEFAULT_TEXT_KEY, Sources, suffix
from model.train.data.vocabulary import KINDS, UNKNOWN, Vocabulary
from model.train.step.loss_backend import COMPILE_MODES
from model.train.step.schedule import SHAPES, Limits

_PRESET_DEFAULT = "the preset's"
ADAMW_LR = 0.001
"""Default of --lr if AdamW updates all parameters: 0.004 trained poorly with post-norm (textbook, width 128)."""
TOY_ADAMW_LR = 0.1
"""Converged with each of ten seeds."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of the command line."""

    name: str
    """Flag and placeholder of its value; "..." after it allows several values."""
    meaning: str
    kind: Callable[[str], object] | tuple[str, ...] | type[argparse.Action] | str | None = None
    """Type of the value, allowed values, or argparse action."""
    default: object = None
    overrides: Mapping[str, object] = field(default_factory=dict)
    """Preset or "--init" -> its own default; None if the default comes from the model."""
    note: str = ""
    """Addition to the default in the help text."""

    @property
    def option(self) -> str:
        """Attribute name of the value."""
        return self.name.split()[0].removeprefix("--").replace("-", "_")

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """Adds the flag to argparse, with the default None."""
        flag, _, value = self.name.partition(" ")
        how: dict[str, Any] = {"help": self._help()}
        if value:
            how |= {"metavar": value.removesuffix("..."), "nargs": "+" if value.endswith("...") else None}
        match self.kind:
            case tuple():
                how["choices"] = self.kind
            case str() | type():
                how["action"] = self.kind
            case _:
                how["type"] = self.kind
        group.add_argument(flag, **how)

    def _help(self) -> str:
        description = [
            f"{profile}: {_format_value(value)}" for profile, value in self.overrides.items() if value is not None
        ]
        defaults = [_format_value(self.default), *description] if self.overrides or self.default is not None else []
        default = "; ".join(defaults) + self.note
        return f"{self.meaning} (default: {default})" if default else self.meaning


FLAGS = {
    "training data": [
        Flag(
            "--data PATH...",
            ".txt, .md, .jsonl, each also .gz: files, folders, patterns, or - (stdin)",
            command_line.path,
        ),
        Flag("--pairs FILE.tsv...", "source<TAB>target lines, for presets with an encoder", command_line.path),
        Flag("--per-line", "every line is a text by itself", argparse.BooleanOptionalAction, False, {"toy": True}),
        Flag("--tokenizer", "what tokens are", KINDS, "bpe", {"toy": "words"}),
        Flag("--end-token TEXT", "the special token that ends a text", None, SEPARATOR, {"toy": "<EOS>"}),
        Flag(
            "--vocab-size N",
            "tokens of the vocabulary",
            command_line.vocabulary_size,
            note="the preset's, fewer if the text supports no more; words: all",
        ),
        Flag("--straighten SHARE", "texts given ASCII quotes", command_line.fraction, note="0.5; --init: 0"),
        Flag(
            "--held-out SHARE",
            "documents kept apart and measured",
            command_line.small_fraction,
            0.01,
            note="; of fewer than 100 the last 5 %% of all text",
        ),
        Flag("--unseen PATH...", "texts never trained on, each measured by itself in the end", command_line.path),
        Flag("--text-key KEY", "key of the texts in .jsonl", note=DEFAULT_TEXT_KEY),
    ],
    "the model": [
        Flag(
            "--preset NAME",
            f"{', '.join(PRESET_NAMES)}, or auto: by text, device and --max-minutes",
            command_line.preset_name,
            "small",
        ),
        Flag("--arch", "another layout in the size of a preset", ARCHS, note=_PRESET_DEFAULT),
        Flag(
            "--init DIR",
            "start from these weights: ours, a Hugging Face directory with its tokenizer, or org/name of the Hub",
            command_line.path,
        ),
        Flag(
            "--context N",
            f"longest sequence in tokens (default: {_PRESET_DEFAULT}); with --init of training (default: up to 512)",
            command_line.positive_int,
        ),
        Flag("--layers N", "blocks of the decoder, and of an encoder", command_line.positive_int, note=_PRESET_DEFAULT),
        Flag(
            "--width N",
            "size of the residual stream; the feed-forward follows",
            command_line.positive_int,
            note=_PRESET_DEFAULT,
        ),
        Flag("--heads N", "query heads; they share the width", command_line.positive_int, note=_PRESET_DEFAULT),
        Flag("--kv-heads N", "key and value heads", command_line.positive_int, note=_PRESET_DEFAULT),
        Flag("--mlp-width N", "hidden size of the feed-forward", command_line.positive_int, note=_PRESET_DEFAULT),
    ],
    "how long": [
        Flag("--max-minutes N", "train this long; the learning rate follows", command_line.positive_number),
        Flag("--epochs N", "train this many times over the text", command_line.positive_number, None, {"--init": 3.0}),
        Flag("--tokens N", "train on this many tokens", command_line.positive_int),
        Flag("--steps N", "train this many steps", command_line.positive_int, None, {"toy": 400, "cross": 2000}),
    ],
    # --init defaults to AdamW: pretrained knowledge is in a few large directions of each matrix, and Muon changes all
    # directions equally. Fine-tuning our model, trained with Muon, on 80 kB of plays lowered held-out bits per byte
    # from 3.040 to 1.715 with AdamW, 1.744 with Muon at 0.01, 2.184 at 0.002. Rate and number format depend on the
    # model.
    "how to train": [
        Flag(
            "--windows N",
            "windows, lines or pairs a step",
            command_line.windows,
            16,
            {"toy": 2, "cross": 64, "--init": 8},
        ),
        Flag(
            "--micro-windows N",
            "how many of them at once",
            command_line.positive_int,
            note="on a CPU about 2,048 tokens, else what fits",
        ),
        Flag(
            "--optimizer",
            "of the blocks' matrices",
            command_line.OPTIMIZERS,
            "muon",
            {"toy": "adamw", "--init": "adamw"},
        ),
        Flag("--matrix-lr RATE", "learning rate of Muon", command_line.positive_number, 0.02, {"--init": 0.01}),
        Flag(
            "--lr RATE",
            "learning rate of AdamW",
            command_line.positive_number,
            0.004,
            {"--init": None},
            note=f"; alone {ADAMW_LR}; toy: {TOY_ADAMW_LR}; --init: 4 / width^1.5",
        ),
        Flag("--weight-decay SHARE", "of the matrices", command_line.non_negative_number, 0.05),
        Flag("--schedule", "how the learning rate falls", SHAPES, "linear"),
        Flag("--warm-up STEPS", "until it is whole", command_line.non_negative_int, 100, {"--init": 10}),
        Flag(
            "--warm-down SHARE",
            "of a linear schedule: share of the run over which it falls to 0",
            command_line.fraction,
            0.4,
        ),
        Flag("--seed N", "of the weights and the order", command_line.non_negative_int, 1),
    ],
    "the run": [
        Flag("--dry-run", "print size, memory, disk and time, and write nothing", "store_true"),
        Flag("--resume", "continue the run in --out", "store_true"),
        Flag("--overwrite", "start over although --out holds a run or a model", "store_true"),
        Flag("--device", "auto: a GPU where one is", ("auto", "cpu", "cuda"), "auto"),
        Flag(
            "--dtype",
            "of the computation; auto: bfloat16 where the device has it",
            ("auto", "float32", "bfloat16"),
            "auto",
        ),
        Flag("--compile", "the step by torch.compile; auto: on a GPU where Triton is", COMPILE_MODES, "auto"),
        Flag("--report-seconds N", "between progress lines", command_line.positive_number, 10.0),
        Flag("--save-seconds N", "between snapshots", command_line.positive_number, 300.0),
        Flag(
            "--sample-prompt TEXT",
            "what samples continue; may be repeated",
            "append",
            note="openings of held-out documents",
        ),
        Flag("--tensorboard", "also write event files into OUT/tensorboard", "store_true"),
    ],
    "the result": [
        Flag("--ema DECAY", "export an average of the weights", command_line.decay, 0.0, note=", off"),
        Flag("--keep", "which held-out measurement's weights", ("best", "last"), "best"),
        Flag(
            "--export-dtype",
            "of the weights written",
            command_line.DTYPES,
            "bfloat16",
            {"toy": "float32", "--init": None},
            "; --init: as they were",
        ),
        Flag(
            "--name NAME",
            "of the model; clients of the service know it by this",
            command_line.model_name,
            note="that of its directory",
        ),
        Flag("--about FILE", "text for the model card: corpus, license, intended use", command_line.path),
        Flag("--license ID", "of the model, for the card's head: mit, cc0-1.0, ...", command_line.license_id),
        Flag("--language CODE", "of the text, for the card's head: en, pt-BR, ...", command_line.language),
    ],
}


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    p = OneLineParser(
        prog=program_name(),
        usage=f"{program_name()} --data PATH... --out DIR --max-minutes N [FLAG...]",
        description="Train a model on text, and write a weights directory for the service.",
        allow_abbrev=False,
    )
    p.add_argument(
        "--out", required=True, type=command_line.path, metavar="DIR", help="where the weights directory goes"
    )
    for title, flags in FLAGS.items():
        group = p.add_argument_group(title)
        for flag in flags:
            flag.add_to(group)
    return p


def _format_value(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


_SET_BY_INIT = (
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
    """Parses the flags and applies the preset's defaults. Exits the program on invalid flags."""
    flags = parser()
    options = flags.parse_args(arguments)
    if options.init and (conflicting := [name for name in _SET_BY_INIT if getattr(options, name) is not None]):
        both = ", ".join(f"--{name.replace('_', '-')}" for name in conflicting)
        flags.error(f"{both} cannot be combined with --init: the model defines its shape and tokenizer")
    if options.resume and options.overwrite:
        flags.error("--resume cannot be combined with --overwrite: continue the run, or start over")
    if options.warm_down is not None and options.schedule not in (None, "linear"):
        flags.error(f"--warm-down needs --schedule linear, not {options.schedule}: omit it")
    given, profile = argparse.Namespace(**vars(options)), "--init" if options.init else options.preset
    for flag in (flag for rows in FLAGS.values() for flag in rows):
        is_limited = flag.option in ("steps", "epochs") and limits(given).flags()
        if getattr(given, flag.option) is None and not is_limited:
            setattr(options, flag.option, flag.overrides.get(profile, flag.default))
    if options.optimizer == "adamw":
        if given.matrix_lr is not None:
            flags.error("--matrix-lr needs --optimizer muon; adamw uses only --lr")
        if given.lr is None and not options.init:
            options.lr = TOY_ADAMW_LR if options.preset == "toy" else ADAMW_LR
    options.greedy = profile in ("toy", "cross")  # a single answer is right, so the service samples greedily
    # The first token of a line is predicted from an end token, except in the notebook of preset toy.
    options.lines_from_end = profile != "toy"
    return options


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


def vocabulary(options: argparse.Namespace) -> Vocabulary:
    """Settings of the tokenizer to train. Raises ConfigError."""
    end: str = options.end_token
    if not end or end.split() != [end] or end == UNKNOWN:
        raise ConfigError(f"--end-token must be one word other than {UNKNOWN}, not {end!r}")
    size = preset(options.preset).vocab_size if options.tokenizer == "bpe" else None
    # An explicit size that the text cannot fill is an error; a preset's size is only an upper bound.
    fewer = options.vocab_size is None
    return Vocabulary(kind=options.tokenizer, size=options.vocab_size or size, end_token=end, fewer=fewer)


def limits(options: argparse.Namespace) -> Limits:
    """Length of the run."""
    return Limits(steps=options.steps, epochs=options.epochs, tokens=options.tokens, minutes=options.max_minutes)


def sources(options: argparse.Namespace, names: Sequence[str]) -> Sources:
    """Text sources of these names, with the flags for reading applied. Raises ConfigError and DataError."""
    out = Path(options.out)
    if options.text_key is not None:
        found = Sources([*(options.pairs or options.data), *(options.unseen or [])], exclude=out).paths()
        if not any(suffix(path) == ".jsonl" for path in found):
            raise ConfigError("--text-key needs .jsonl files, and the data has none: omit it")
    return Sources(names, text_key=options.text_key or DEFAULT_TEXT_KEY, exclude=out)


def check_sources(options: argparse.Namespace, model: str, *, has_encoder: bool) -> None:
    """Checks that the data flags suit the model. Raises ConfigError."""
    if has_encoder and not options.pairs:
        raise ConfigError(f"{model} has an encoder, which reads sources: use --pairs FILE.tsv")
    if options.pairs and not has_encoder:
        raise ConfigError(f"{model} has no encoder to read sources: use --data, or --preset cross")
    if options.pairs and options.data:
        raise ConfigError("--data cannot be combined with --pairs: preset cross trains on --pairs")
    if not options.pairs and not options.data:
        raise ConfigError("the training data is missing: --data PATH")
    if options.sample_prompt is not None:
        if options.pairs or options.per_line:
            raise ConfigError("--sample-prompt needs running text; lines and pairs are sampled by themselves: omit it")
        if not all(text.strip() for text in options.sample_prompt):
            raise ConfigError("--sample-prompt is empty; give the start of a text")
    if options.straighten is not None and (options.pairs or options.per_line):
        raise ConfigError("--straighten needs running text; lines and pairs are not changed: omit it")
    if options.unseen and (options.pairs or options.per_line):
        raise ConfigError("--unseen needs running text; use --held-out for lines and pairs")
    if options.pairs and options.per_line:
        raise ConfigError("--per-line needs --data; lines of --pairs are always independent: omit it")
