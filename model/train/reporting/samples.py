"""samples.md: samples of the same prompts at several stages of a run, to show the progress, made from the log."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from model.train.reporting.metrics_log import Record

_MARKUP = re.compile(r"[\\`*_\[\]<>#|~$&]|^[-+=]")
_NUMBERED = re.compile(r"^(\d+)([.)])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A generated text."""

    prompt: str
    full_text: str
    """Prompt and text, for display."""


def samples_page(records: Sequence[Record], *, title: str, measured: str) -> str:
    """Markdown with the samples in the log, by prompt and stage. measured: name of the evaluated text."""
    stages = [record for record in records if "samples" in record]
    parts = [
        f"# Samples of {plain(title)}",
        "The same prompts at several stages of the training, each from the same random seed; nothing is chosen.",
    ]
    for prompt in stages[-1]["samples"]:
        parts.append(f"## {plain(prompt)}")
        for record in stages:
            if prompt in record["samples"]:  # a resumed run may have others
                bits = record.get("held_out_whole", record.get("held_out"))
                held_out = "" if bits is None else f", {measured} bits per byte {bits:.4f}"
                training = f"training bits per byte {record['bits_per_byte']:.4f}"
                parts.append(f"**{100 * record['fraction']:.3g} %**, step {record['step']}, {training}{held_out}:")
                parts.append(quoted(record["samples"][prompt]))
    return "\n\n".join(parts) + "\n"


def plain(line: str) -> str:
    """Escapes Markdown in one line and replaces control characters."""
    shown = visible(line.strip()).replace("\t", "\ufffd")
    return _NUMBERED.sub(r"\1\\\2", _MARKUP.sub(r"\\\g<0>", shown))


def visible(text: str) -> str:
    """Replaces control characters except tabs and line ends: printed, they would control the terminal."""
    return "".join(c if c.isprintable() or c in "\t\n" else "\ufffd" for c in text)


def quoted(text: str) -> str:
    """The text as a Markdown quotation that preserves line breaks."""
    lines = [plain(line) for line in text.strip("\n").split("\n")]
    return "\n".join(f"> {line}  " if line else ">" for line in lines)
