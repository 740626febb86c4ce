"""The model card: what it reports about a run, and metadata that the hub reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from model.train.common.sample import DEFAULT_SAMPLING, GREEDY_SAMPLING, Sample, SamplingSettings
from model.train.reporting.model_card import RunFacts, model_card, shorten_names
from model.train.reporting.report import closing_summary
from tests.support.model.tiny_models import tiny_config

FACTS = RunFacts(
    command="python -m model.train --data books --out out",
    device="AMD EPYC, 2 threads",
    start="trained from scratch",
    seed=1,
    steps=2860,
    tokens=23_429_120,
    seconds=6600.0,
    epochs=0.8,
    corpus="7250 documents, 29307208 training and 181836 held-out tokens",
    sources=["books"],
    measured="held-out",
    bits_per_byte=1.41577,
    unseen={"emma_*.txt": 1.48123, "kim.txt": 1.5},
    date="2026-11-22",
    about="",
    exported="weights after the last step",
    license="cc0-1.0",
    language="en",
)
SAMPLES = [Sample(prompt="Once", full_text="Once upon\n\n# a *time*")]


def _card(
    facts: RunFacts = FACTS, sampling: SamplingSettings = DEFAULT_SAMPLING, family: str = "llama"
) -> tuple[dict[str, Any], str]:
    """(the head, what follows it)."""
    text = model_card(tiny_config(), 4_740_352, facts, SAMPLES, sampling=sampling, sha256="f00d", family=family)
    nothing, head, body = text.split("---\n", 2)
    assert not nothing
    return yaml.safe_load(head), body


@pytest.mark.parametrize(
    ("family", "library"), [("llama", "transformers"), ("gpt2", "transformers"), ("inkstream", "inkstream")]
)
def test_the_head_says_what_the_hub_asks_and_no_more_than_is_known(family: str, library: str) -> None:
    head, body = _card(family=family)
    tags = ["inkstream", family] if family != "inkstream" else ["inkstream"]
    known = {"library_name": library, "pipeline_tag": "text-generation", "tags": tags}
    assert head == {"license": "cc0-1.0", "language": "en", **known}
    assert ("from transformers" in body) == (library == "transformers")
    assert _card(replace(FACTS, license=None, language=None), family=family)[0] == known
    assert _card(replace(FACTS, language="no"))[0]["language"] == "no", "and no truth value"


def test_the_body_has_every_figure_once_and_samples_as_they_came() -> None:
    _, body = _card(replace(FACTS, about="These are the books of a person."))
    assert body.startswith("\n# Model card\n")
    assert _card(replace(FACTS, name="plays-5m"))[1].startswith("\n# plays-5m\n")
    for row in (
        "| held-out bits per byte | **1.4158** |",
        r"| never seen: emma\_\*.txt | 1.4812 bits per byte |",
        "| corpus | books; 7250 documents, 29307208 training and 181836 held-out tokens |",
        "| tokens seen | 23,429,120 (0.80 epochs) in 2860 steps |",
        "| time and device | 1h 50m on AMD EPYC, 2 threads, 3,550 tokens/s |",
        "| SHA-256 of model.safetensors | `f00d` |",
        "These are the books of a person.",
        "> Once upon  \n>\n> \\# a \\*time\\*  \n",
        "temperature 0.8, top_p 0.95 and repetition_penalty 1.05",
        "knows no facts",
    ):
        assert body.count(row) == 1, row
    assert "](loss.svg)" in body and "](samples.md)" in body and "4.74 M parameters" in body
    assert "The likeliest token each time, not chosen" in _card(sampling=GREEDY_SAMPLING)[1]


def test_folders_of_files_are_hidden_unless_only_they_tell_them_apart() -> None:
    assert shorten_names(["/home/me/a.txt", "b/*.md", "-"]) == ["a.txt", "*.md", "standard input"]
    assert shorten_names(["/one/a.txt", "/two/a.txt"]) == ["/one/a.txt", "/two/a.txt"]
    assert shorten_names(["same.txt", "same.txt"]) == ["same.txt", "same.txt"]


def test_the_last_line_is_the_command_that_serves(tmp_path: Path) -> None:
    out = tmp_path / "my model"
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"x" * 2_500_000)
    first, unseen, _, written, serve = closing_summary(out, FACTS).splitlines()
    assert first == "held-out bits per byte 1.4158 after 2860 steps, 1h 50m"
    assert unseen == "unseen emma_*.txt: 1.4812 bits per byte"
    assert "(2.5 MB)" in written and serve.endswith(f" -m app serve --weights '{out}'")
