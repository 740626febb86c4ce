"""The material that the flags name, in the form that they name. Knows no training."""

from __future__ import annotations

import argparse
from pathlib import Path

from model.config import ModelConfig
from model.material import Material, of_text
from model.options import vocabulary
from model.rows import of_lines, of_pairs


def gather(options: argparse.Namespace, config: ModelConfig, cache: Path) -> Material:
    """cache: where running text keeps its tokens. Raises ConfigError, DataError and TokenizerError."""
    words, context, rows, seed = vocabulary(options), config.context, options.windows, options.seed
    if options.pairs:
        return of_pairs(options.pairs, vocabulary=words, context=context, rows=rows, seed=seed)
    if options.per_line:
        from_end = options.lines_from_end
        return of_lines(options.data, vocabulary=words, from_end=from_end, context=context, rows=rows, seed=seed)
    straighten = 0.5 if options.straighten is None else options.straighten
    return of_text(options.data, cache, vocabulary=words, context=context, rows=rows, seed=seed, straighten=straighten)
