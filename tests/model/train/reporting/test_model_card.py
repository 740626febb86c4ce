"""The model card: what it reports about a run, and metadata that the hub reads."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from model.train.reporting.model_card import model_card, shorten_names
from model.train.reporting.samples import Sample
from model.train.sampling import DEFAULT_SAMPLING, GREEDY_SAMPLING
from tests.support.model.tiny_models import tiny_config

FACTS: dict[str, Any] = {
    "family": "llama",
    "name": None,
    "metadata": {"license": "cc0-1.0", "language": "en"},
    "start": "trained from scratch",
    "about": "",
    "results": {"held-out bits per byte": "**1.4158**", "seed": "1"},
    "command": "python -m model.train --data books --out out",
    "samples": [Sample(prompt="Once", full_text="Once upon\n\n# a *time*")],
    "sampling": str(DEFAULT_SAMPLING),
}


def _card(**changed: Any) -> tuple[dict[str, Any], str]:
    """(the head, what follows it)."""
    nothing, head, body = model_card(tiny_config(), 4_740_352, **FACTS | changed).split("---\n", 2)
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
    assert _card(metadata={"license": None, "language": None}, family=family)[0] == known
    assert _card(metadata={"language": "no"})[0]["language"] == "no", "and no truth value"


def test_the_body_has_every_figure_once_and_samples_as_they_came() -> None:
    _, body = _card(about="These are the books of a person.")
    assert body.startswith("\n# Model card\n") and _card(name="plays-5m")[1].startswith("\n# plays-5m\n")
    for row in (
        "| held-out bits per byte | **1.4158** |\n| seed | 1 |",
        "\npython -m model.train --data books --out out\n",
        "These are the books of a person.",
        "> Once upon  \n>\n> \\# a \\*time\\*  \n",
        "temperature 0.8, top_p 0.95 and repetition_penalty 1.05",
        "knows no facts",
        "A decoder of 4.74 M parameters, trained from scratch by",
    ):
        assert body.count(row) == 1, row
    assert "](loss.svg)" in body and "](samples.md)" in body
    assert "The likeliest token each time, not chosen" in _card(sampling=str(GREEDY_SAMPLING))[1]


def test_folders_of_files_are_hidden_unless_only_they_tell_them_apart() -> None:
    assert shorten_names(["/home/me/a.txt", "b/*.md", "-"]) == ["a.txt", "*.md", "standard input"]
    assert shorten_names(["/one/a.txt", "/two/a.txt"]) == ["/one/a.txt", "/two/a.txt"]
    assert shorten_names(["same.txt", "same.txt"]) == ["same.txt", "same.txt"]
