"""The model card: what a run was and what came out, as the README.md of a weights directory. Knows only its facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from model.config import ModelConfig
from model.describe import describe_size, shape_lines
from model.train.sample import Prompt

_ABOUT = "It continues text as its corpus does. It knows no facts and follows no instructions."


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a finished run knows about itself."""

    command: str
    start: str
    """What the weights were before: "trained from scratch" or "fine-tuned from ..."."""
    device: str
    seed: int
    steps: int
    tokens: int
    minutes: float
    epochs: float
    corpus: str
    """How much there was to learn from, in words."""
    measured: str
    """What bits_per_byte is of: "held-out" or "training" text."""
    bits_per_byte: float
    date: str
    exported: str
    """Which weights of the run these are, in words."""
    about: str
    """Text the user adds with --about: corpus, licence, intended use."""


def model_card(
    config: ModelConfig, n_params: int, facts: RunFacts, samples: Sequence[tuple[Prompt, str]], sha256: str
) -> str:
    """Markdown. samples: (prompt, the text that came)."""
    shown = "\n\n".join(f"Prompt `{prompt.text}`:\n\n> {_quoted(prompt.joined(text))}" for prompt, text in samples)
    kind = "An encoder and decoder" if config.n_encoder_layers else "A decoder"
    shape = "\n".join(f"| {what} | {text} |" for what, text in shape_lines(config))
    return f"""# Model card

{kind} of {describe_size(n_params)} parameters, {facts.start} by `python -m model.train`.

{facts.about or _ABOUT}

| | |
|---|---|
{shape}
| vocabulary | {config.vocab_size} |
| {facts.measured} bits per byte | **{facts.bits_per_byte:.4f}** |
| corpus | {facts.corpus} |
| tokens seen | {facts.tokens} ({facts.epochs:.2f} epochs) in {facts.steps} steps |
| exported | {facts.exported} |
| time and device | {facts.minutes:.0f} minutes on {facts.device} |
| seed | {facts.seed} |
| date | {facts.date} |
| SHA-256 of model.safetensors | `{sha256}` |

Command:

```
{facts.command}
```

## Samples

Drawn with the sampling defaults in generation_config.json, not chosen.

{shown}
"""


def read_about(path: str | None) -> str:
    """Text for the card, read before hours of training and not after. Raises ValueError."""
    try:
        return Path(path).read_text(encoding="utf-8").strip() if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--about {path}: cannot be read ({error})") from None


def _quoted(text: str) -> str:
    return text.replace("\n", "\n> ")
