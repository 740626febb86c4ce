"""The flags as they stand after the preset's recipe has filled in what nobody gave. Knows no torch."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from model.train.flags import USUAL_PRESET, parser
from model.train.recipes import FINE_TUNING, recipe

_SHAPE = ("preset", "arch", "n_layers", "width", "n_heads", "n_kv_heads", "mlp_width")
_BROUGHT = (*_SHAPE, "vocab_size", "tokenizer", "end_token")
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
