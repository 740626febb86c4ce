"""How each preset trains where no flag says otherwise. The flags' help texts are made from it. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from model.presets import PRESET_NAMES
from model.tokenizer import SEPARATOR
from model.train.data.vocabulary import Kind

Optimizer = Literal["muon", "adamw"]
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
"""Of weights on disk; float16 is none to train in, its smallest numbers are too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One default for each flag of the same name."""

    tokenizer: Kind = "bpe"
    end_token: str = SEPARATOR
    per_line: bool = False
    lines_from_end: bool = True
    """Whether a line's first token is told from an end token, as one after an empty prompt is; no flag."""
    optimizer: Optimizer = "muon"
    matrix_lr: float = 0.02
    lr: float | None = 0.004
    """Of the parameters that Muon leaves to AdamW."""
    lr_alone: float | None = 0.001
    """The default of --lr where AdamW has everything: 0.004 learnt badly after a norm (textbook, width 128)."""
    windows: int = 16
    warm_up: int = 100
    """Steps until the learning rate is whole."""
    warm_down: float = 0.4
    export_dtype: Dtype | None = "bfloat16"
    steps: int | None = None
    """Where nothing else says how long to train."""
    epochs: float | None = None
    """The same."""
    greedy: bool = False
    """Whether the model's answers have one right form, so that serving takes the likeliest token; no flag."""


_RECIPES = {
    # 42 numbers are worth every bit of them; AdamW at this rate learnt from each of ten seeds.
    "toy": Recipe(
        tokenizer="words",
        end_token="<EOS>",
        per_line=True,
        lines_from_end=False,  # as in its notebook, position 0 is the first word's
        optimizer="adamw",
        lr_alone=0.1,
        windows=2,
        export_dtype="float32",
        steps=400,
        greedy=True,
    ),
    "cross": Recipe(windows=64, greedy=True, steps=2000),
}

# AdamW and not Muon: what is good in those weights are a few large directions of each matrix, and Muon moves all
# directions alike. 80 kB of plays brought our model, which Muon had trained, from 3.040 held-out bits per byte to 1.715
# by AdamW, to 1.744 by Muon at 0.01, to 2.184 at 0.002. Rate and number format depend on the model (see init.py).
FINE_TUNING = Recipe(
    optimizer="adamw", lr=None, lr_alone=None, matrix_lr=0.01, windows=8, warm_up=10, export_dtype=None, epochs=3.0
)
"""Of a run that goes on from weights."""


def recipe(preset: str) -> Recipe:
    """The defaults of the preset called so."""
    return _RECIPES.get(preset, Recipe())


def told(name: str) -> str:
    """The default of the flag `name`, and those of presets that differ, for a help text."""
    common, own = getattr(Recipe(), name), {p: getattr(recipe(p), name) for p in PRESET_NAMES}
    others = [f"{p}: {_word(value)}" for p, value in own.items() if value != common]
    return "; ".join([_word(common), *others])


def _word(value: object) -> str:
    if value is None:
        return "none"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
