"""Exports a finished run atomically: weights, tokenizer, sampling defaults and the model card (README.md).

The card documents the model, its training data and the results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from model.checkpoint.checkpoint import weights_files
from model.checkpoint.golden import GOLDEN_FILE, MAX_PROMPT_IDS
from model.checkpoint.golden_export import as_stored, golden_file
from model.checkpoint.manifest import MANIFEST_FILE, manifest_file
from model.checkpoint.model_summary import describe_size, shape_lines
from model.checkpoint.tensor_index import WEIGHTS_FILE
from model.config import ModelConfig
from model.files import parse_object, write_files
from model.nn.transformer import Decoder
from model.tokenizer.tokenizer import Tokenizer
from model.train.common.console import duration
from model.train.common.sample import Sample, SamplingSettings
from model.train.reporting.samples import plain, quoted
from model.train.setup.finetune import Base

_ABOUT = "It continues text as its corpus does."
_LIMITS = """It writes on from what it is given, in the manner of the texts it has read, and wanders. It knows no facts
and follows no instructions: what it says of the world, of persons or of itself is made up. What its texts hold of
prejudice, it may repeat. It was measured on text of the same kind; other text it continues worse."""
_NATIVE_FAMILY = "inkstream"
"""Name of the native family, which no other library supports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts about a finished run, for the model card."""

    command: str
    start: str
    """Origin of the weights: "trained from scratch" or "fine-tuned from ..."."""
    device: str
    seed: int
    steps: int
    tokens: int
    seconds: float
    epochs: float
    corpus: str
    """Description of the size of the corpus."""
    sources: Sequence[str]
    """Names of the data, without local paths."""
    measured: str
    """Text that bits_per_byte refers to: "held-out" or "training"."""
    bits_per_byte: float | None
    """None if an unfinished run was not measured yet."""
    unseen: Mapping[str, float]
    """Name -> bits per byte, of texts excluded from training."""
    date: str
    exported: str
    """Description of the exported weights, such as the step they are from."""
    about: str
    """Text of --about: corpus, license, intended use."""
    name: str | None = None
    """Name of the model."""
    license: str | None = None
    """License id of the Hugging Face hub: mit, cc0-1.0, ..."""
    language: str | None = None


def model_card(
    config: ModelConfig,
    n_params: int,
    facts: RunFacts,
    samples: Sequence[Sample],
    *,
    family: str,
    sampling: SamplingSettings,
    sha256: str,
) -> str:
    """Markdown with front matter for the hub. family: model_type of the config.json. sampling: of the samples."""
    kind = "An encoder and decoder" if config.n_encoder_layers else "A decoder"
    parts = [
        _front_matter(config, family, facts),
        f"# {facts.name or 'Model card'}",
        f"{kind} of {describe_size(n_params)} parameters, {facts.start} by `python -m model.train`.",
        facts.about or _ABOUT,
        _table(_facts(config, facts, sha256)),
        "![Bits per byte over tokens seen: training and held-out](loss.svg)",
        f"Command:\n\n```\n{facts.command}\n```",
        f"## Use\n\n{_use(family)}",
        f"## Samples\n\n{_describe_sampling(sampling)}, not chosen. How they came to this: [samples.md](samples.md)."
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


def _front_matter(config: ModelConfig, family: str, facts: RunFacts) -> str:
    lines = [] if facts.license is None else [f'license: "{facts.license}"']
    lines += [] if facts.language is None else [f'language: "{facts.language}"']  # else "no" would be false
    lines.append(f"library_name: {'transformers' if family != _NATIVE_FAMILY else _NATIVE_FAMILY}")
    lines += [] if config.n_encoder_layers else ["pipeline_tag: text-generation"]
    tags = dict.fromkeys([_NATIVE_FAMILY, family])
    return "\n".join(["---", *lines, "tags:", *(f"- {tag}" for tag in tags), "---"])


def _facts(config: ModelConfig, facts: RunFacts, sha256: str) -> list[tuple[str, str]]:
    per_second = facts.tokens / max(facts.seconds, 1e-9)
    return [
        *shape_lines(config),
        ("vocabulary", str(config.vocab_size)),
        (f"{facts.measured} bits per byte", _bits(facts.bits_per_byte)),
        *((f"never seen: {plain(name)}", f"{bits:.4f} bits per byte") for name, bits in facts.unseen.items()),
        ("corpus", "; ".join([", ".join(map(plain, facts.sources)), facts.corpus])),
        ("tokens seen", f"{facts.tokens:,} ({facts.epochs:.2f} epochs) in {facts.steps} steps"),
        ("exported", facts.exported),
        ("time and device", f"{duration(facts.seconds)} on {facts.device}, {per_second:,.0f} tokens/s"),
        ("seed", str(facts.seed)),
        ("date", facts.date),
        ("SHA-256 of model.safetensors", f"`{sha256}`"),
    ]


def _bits(bits_per_byte: float | None) -> str:
    return "not measured yet" if bits_per_byte is None else f"**{bits_per_byte:.4f}**"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {what} | {text} |" for what, text in rows)])


def _use(family: str) -> str:
    serve = "Serve it, from a clone of inkstream:\n\n```\nmake serve WEIGHTS=path/to/this/directory\n```"
    if family == _NATIVE_FAMILY:
        return serve
    return f"""{serve}

Or in Python:

```python
from transformers import pipeline

print(pipeline("text-generation", ".")("Once upon a time", max_new_tokens=100)[0]["generated_text"])
```"""


def _describe_sampling(sampling: SamplingSettings) -> str:
    if not sampling.temperature:
        return "The likeliest token each time"
    how = f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}"
    return f"Drawn with {how} and repetition_penalty {sampling.repetition_penalty:g}"


def write_result(
    out: Path,
    decoder: Decoder,
    tokenizer: Tokenizer,
    facts: RunFacts,
    dtype: torch.dtype,
    *,
    samples: Sequence[Sample],
    golden_text: str,
    sampling: SamplingSettings,
    base: Base | None,
) -> None:
    """Writes a directory that the service can load. Raises CheckpointError.

    golden_text: prompt of golden.json. sampling: settings of the samples, and sampling defaults of the model unless
    `base` has its own.
    """
    files = base.result(decoder, dtype) if base else _new_files(decoder, tokenizer, dtype, sampling)
    ids = tokenizer.encode(golden_text)
    # A small vocabulary may contain no word of the prompts.
    golden_prompt = (ids if len(ids) > 1 else [0, 0])[: min(MAX_PROMPT_IDS, decoder.config.context)]
    files[GOLDEN_FILE] = golden_file(as_stored(decoder, dtype), golden_prompt)
    sha256 = hashlib.sha256(files[WEIGHTS_FILE]).hexdigest()
    family, n_params = parse_object(files["config.json"])["model_type"], decoder.n_params
    card = model_card(
        decoder.config, n_params, facts, samples, family=family, sampling=sampling, sha256=sha256
    ).encode()
    # Write the manifest last: until it exists, a reader of the directory sees that it is incomplete.
    write_files(out, {**files, "README.md": card, MANIFEST_FILE: manifest_file(files, facts.name)})


def _new_files(
    decoder: Decoder, tokenizer: Tokenizer, dtype: torch.dtype, sampling: SamplingSettings
) -> dict[str, bytes]:
    """Weights, tokenizer and sampling defaults of a model trained from scratch."""
    generation = {"do_sample": True, **asdict(sampling)} if sampling.temperature else {"do_sample": False}
    files = weights_files(decoder, dtype=dtype, eos_id=tokenizer.eos_id, generation=generation)
    return files | {name: content.encode() for name, content in tokenizer.files().items()}
