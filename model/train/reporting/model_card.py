"""The model card, README.md: the model, its training data and the results, in Markdown with metadata for the hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from model.checkpoint.model_summary import describe_size, shape_lines
from model.config import ModelConfig
from model.train.reporting.samples import Sample, plain, quoted

_ABOUT = "It continues text in the style of its training data."
_LIMITS = """It continues a text in the style of its training data, and wanders. It knows no facts and follows no
instructions: what it writes about the world, people or itself is made up. It may repeat prejudices of its training
data. The figures are for text of the same kind; it continues other text worse."""
_NATIVE_FAMILY = "inkstream"
"""Name of the native family, which no other library supports."""
_PIPELINE = """Or in Python:

```python
from transformers import pipeline

print(pipeline("text-generation", ".")("Once upon a time", max_new_tokens=100)[0]["generated_text"])
```"""


def model_card(
    config: ModelConfig,
    n_params: int,
    *,
    family: str,
    name: str | None,
    metadata: Mapping[str, str | None],
    start: str,
    about: str,
    results: Mapping[str, str],
    command: str,
    samples: Sequence[Sample],
    sampling: str,
) -> str:
    """The card of a run.

    family: model_type of the config.json. metadata: license and language for the hub, if known. start: origin of the
    weights. about: text of --about. results: rows of the table. sampling: how the samples were drawn.
    """
    kind = "An encoder and decoder" if config.n_encoder_layers else "A decoder"
    parts = [
        _front_matter(config, family, metadata),
        f"# {name or 'Model card'}",
        f"{kind} of {describe_size(n_params)} parameters, {start} by `python -m model.train`.",
        about or _ABOUT,
        "\n".join(["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in (*shape_lines(config), *results.items()))]),
        "![Bits per byte over tokens seen: training and held-out](loss.svg)",
        f"Command:\n\n```\n{command}\n```",
        "## Use\n\nServe it, from a clone of inkstream:\n\n```\nmake serve WEIGHTS=path/to/this/directory\n```",
        *([] if family == _NATIVE_FAMILY else [_PIPELINE]),
        f"## Samples\n\n{sampling}, not selected. Samples from earlier steps: [samples.md](samples.md)."
        if samples
        else "## Samples\n\nNone yet: the run is unfinished.",
        *(f"Prompt {plain(sample.prompt)}\n\n{quoted(sample.full_text)}" for sample in samples),
        f"## Limits\n\n{_LIMITS}",
    ]
    return "\n\n".join(parts) + "\n"


def shorten_names(names: Sequence[str]) -> list[str]:
    """File names without their folders if they are unique: local paths do not belong in a published card."""
    short = ["standard input" if name == "-" else Path(name).name or name for name in names]
    return short if len(set(short)) == len(set(names)) else list(names)


def read_about(path: str | None) -> str:
    """Reads the --about text; called before training to fail early. Raises ValueError."""
    try:
        return Path(path).read_text(encoding="utf-8").strip() if path else ""
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ValueError(f"--about {path}: cannot be read ({reason})") from None


def _front_matter(config: ModelConfig, family: str, metadata: Mapping[str, str | None]) -> str:
    lines = [f'{key}: "{value}"' for key, value in metadata.items() if value]  # unquoted, the language "no" is false
    lines.append(f"library_name: {'transformers' if family != _NATIVE_FAMILY else _NATIVE_FAMILY}")
    lines += [] if config.n_encoder_layers else ["pipeline_tag: text-generation"]
    tags = dict.fromkeys([_NATIVE_FAMILY, family])
    return "\n".join(["---", *lines, "tags:", *(f"- {tag}" for tag in tags), "---"])
