"""The model card: what a run was and what came out, as the README.md of a weights directory. Knows only its facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from model.config import ModelConfig

_ABOUT = "It continues text as its corpus does. It knows no facts and follows no instructions."


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a finished run knows about itself."""

    command: str
    device: str
    seed: int
    steps: int
    tokens: int
    minutes: float
    train_tokens: int
    n_documents: int
    bits_per_byte: float
    date: str
    about: str
    """Text the user adds with --about: corpus, licence, intended use."""


def model_card(config: ModelConfig, n_params: int, facts: RunFacts, samples: Mapping[str, str], sha256: str) -> str:
    """Markdown."""
    shown = "\n\n".join(f"Prompt `{prompt}`:\n\n> {_quoted(prompt + text)}" for prompt, text in samples.items())
    shape = (
        f"{config.n_layers} layers x {config.width}, {config.n_heads} query, {config.n_kv_heads} key/value heads of "
        f"{config.head_dim}, SwiGLU {config.mlp_width}, vocabulary {config.vocab_size}, context {config.context}"
    )
    return f"""# Model card

A decoder of {n_params / 1e6:.2f} M parameters (llama layout: {shape}),
trained from scratch by `python -m model.train`.

{facts.about or _ABOUT}

| | |
|---|---|
| held-out bits per byte | **{facts.bits_per_byte:.4f}** |
| corpus | {facts.n_documents} documents, {facts.train_tokens} training tokens |
| tokens seen | {facts.tokens} ({facts.tokens / facts.train_tokens:.2f} epochs) in {facts.steps} steps |
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
