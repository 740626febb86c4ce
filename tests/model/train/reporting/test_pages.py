"""Files that a run leaves: loss.svg parsed as XML, samples.md and its samples, the model card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import yaml

from app.common.types import SamplingParams
from app.engine.sampling.parameters import SamplingInput
from app.engine.sampling.sampler import ADJUSTMENTS, apply_stages, row_parameters
from model.nn.transformer import Decoder
from model.tokenizer.tokenizer import Tokenizer
from model.train.data.batch import batch_of_windows
from model.train.data.examples import Prompt
from model.train.reporting.loss_plot import loss_curve, round_ticks
from model.train.reporting.metrics_log import Record
from model.train.reporting.model_card import model_card, shorten_names
from model.train.reporting.samples import Sample, plain, quoted, samples_page, visible
from model.train.sampling import DEFAULT_SAMPLING, GREEDY_SAMPLING, _penalised, generate_samples
from model.train.step.objective import Objective
from tests.support.model.tiny_models import TEXT, tiny_config

_SVG = "{http://www.w3.org/2000/svg}"
_X, _Y = (76, 832), (92, 418)


def _records(n: int = 2000) -> list[Record]:
    """Records of a loss that falls from 3.3 to 1.4 with noise, measured 20 times and once at the end."""
    found: list[Record] = []
    for i in range(1, n + 1):
        bits = 1.3 + 2.0 * math.exp(-6 * i / n) + 0.02 * math.sin(7 * i)
        held_out = {"held_out": bits - 0.05} if i % max(1, n // 20) == 0 else {}
        found.append({"step": i, "tokens": 10_000 * i, "epoch": 3 * i / n, "bits_per_byte": bits, **held_out})
    return [*found, found[-1] | {"held_out_whole": 1.25}]


def _draw(records: Sequence[Record]) -> ElementTree.Element:
    picture = loss_curve(records, title="<b> & co", measured="held-out")
    assert picture is not None
    return ElementTree.fromstring(picture)


def _line(svg: ElementTree.Element, css: str) -> list[tuple[float, float]]:
    found = svg.find(f"{_SVG}polyline[@class='{css}']")
    assert found is not None
    points = [point.split(",") for point in found.attrib["points"].split()]
    return [(float(x), float(y)) for x, y in points]


def _texts(svg: ElementTree.Element, css: str) -> list[ElementTree.Element]:
    return [element for element in svg.iter(f"{_SVG}text") if element.get("class") == css]


def test_curves_run_left_to_right_inside_the_axes_and_match_the_ticks() -> None:
    svg = _draw(_records())
    for css, n_points in (("training", 2000), ("noise", 2000), ("held-out", 20)):
        points = _line(svg, css)
        assert len(points) == n_points and points == sorted(points)
        assert all(_X[0] <= x <= _X[1] and _Y[0] <= y <= _Y[1] for x, y in points)
        assert points[0][1] < points[-1][1], "falling bits per byte must give a falling line"
    jumps = {css: sum(abs(b - a) for (_, a), (_, b) in pairwise(_line(svg, css))) for css in ("training", "noise")}
    assert jumps["training"] < 0.5 * jumps["noise"], "smoothed"
    across, up = _texts(svg, "x-tick"), _texts(svg, "y-tick")
    assert [text.text for text in across] == ["0 M", "5 M", "10 M", "15 M", "20 M"]
    assert (float(across[0].attrib["x"]), float(across[-1].attrib["x"])) == _X
    ys, ticks = [float(text.attrib["y"]) for text in up], [float(text.text or "") for text in up]
    scale = [(a - b) / math.log(q / p) for (a, p), (b, q) in pairwise(zip(ys, ticks, strict=True))]
    assert len(ticks) >= 4 and max(scale) == pytest.approx(min(scale), rel=0.02), "the axis must be logarithmic"
    (title,), (words, _) = _texts(svg, "title"), _texts(svg, "words")
    assert title.text and title.text.startswith("Bits per byte: training 1.3") and "held-out 1.2500" in title.text
    assert words.text == "<b> & co; 20.00 M tokens, 3.00 epochs"


@pytest.mark.parametrize("n", [1, 2, 50])
def test_short_runs_have_a_plot_and_empty_ones_have_none(n: int) -> None:
    assert len(_line(_draw(_records(n)), "training")) == n
    zero = [{"step": 1, "tokens": 1, "epoch": 1.0, "bits_per_byte": 0.0, "held_out": None}]
    for nothing in ([], zero):
        assert loss_curve(nothing, title="", measured="held-out") is None


@pytest.mark.parametrize(("low", "high"), [(0, 23.4e6), (0, 7680), (0, 2.1e9), (1.3, 3.3), (1.36, 1.39)])
def test_ticks_are_a_few_round_numbers(low: float, high: float) -> None:
    ticks = round_ticks(low, high)
    assert 4 <= len(ticks) <= 8 and low <= ticks[0] and ticks[-1] < high + 1e-9
    steps = {f"{b - a:.1e}" for a, b in pairwise(ticks)}
    assert len(steps) == 1 and steps.pop()[:3] in ("1.0", "2.0", "5.0")


def test_sampling_twice_gives_the_same_texts_and_leaves_no_state() -> None:
    """Sampling must leave neither random state nor inference-mode tensors, because training continues."""
    tokenizer = Tokenizer.train([TEXT], 300)
    decoder = Decoder(tiny_config(vocab_size=tokenizer.vocab_size)).initialize(1)
    prompts = [Prompt(text=text, tokens=tokenizer.encode(text)) for text in ("Once", "\u201cI")]
    before = torch.get_rng_state()
    once, again = (generate_samples(decoder, tokenizer, prompts, 8, DEFAULT_SAMPLING) for _ in range(2))
    assert once == again and once[0].full_text != once[1].full_text
    assert torch.equal(torch.get_rng_state(), before)
    assert (once[0].prompt, once[0].full_text[:4]) == ("Once", "Once")
    objective = Objective(decoder, torch.device("cpu"), torch.float32)
    objective.loss_sum(batch_of_windows(torch.arange(9)[None])).backward()
    assert all(p.grad is not None for p in decoder.parameters())


def test_penalty_equals_that_of_the_service() -> None:
    logits_V = torch.tensor([2.0, -2.0, 1.0, 0.0])
    row = SamplingInput(params=SamplingParams(repetition_penalty=1.25), tokens=[0, 1, 1], n_prompt=1)
    penalized_SV = apply_stages(logits_V[None], row_parameters([row], 4, "cpu"), ADJUSTMENTS).logits_SV
    ours = _penalised(logits_V, [0, 1, 1], 1.25)
    assert ours.tolist() == pytest.approx([1.6, -2.5, 1.0, 0.0])
    assert torch.allclose(ours, penalized_SV[0])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("*a* _b_ `c` <d> [e](f) #g", r"\*a\* \_b\_ \`c\` \<d\> \[e\](f) \#g"),
        ("a\\b & c | d ~e~ $f$", r"a\\b \& c \| d \~e\~ \$f\$"),
        ("- item", r"\- item"),
        ("12. item", r"12\. item"),
        ("3.14 is not a list, but harmless", r"3\.14 is not a list, but harmless"),
        ("bell\x07 escape\x1b[2J", "bell\ufffd escape\ufffd\\[2J"),
        ("\u201cWhere?\u201d", "\u201cWhere?\u201d"),
    ],
)
def test_samples_are_shown_literally_and_not_as_markup(text: str, shown: str) -> None:
    assert plain(text) == shown
    assert visible("a\x1b[2J\x07\r\0b\tc\n\u201cd\u201d") == "a\ufffd[2J\ufffd\ufffd\ufffdb\tc\n\u201cd\u201d"
    assert quoted("\nOne,\n\n    > two\n") == "> One,  \n>\n> \\> two  "


def test_a_resumed_run_may_have_other_prompts() -> None:
    old = {"step": 1, "fraction": 0.1, "bits_per_byte": 1.0, "samples": {"One": "One day"}}
    new = {**old, "step": 2, "samples": {"Two": "Two went", "One": "One night"}}
    page = samples_page([old, new], title="t", measured="held-out")
    assert page.index("> Two went") < page.index("> One day") < page.index("> One night")


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
    """The card as (metadata, body)."""
    nothing, head, body = model_card(tiny_config(), 4_740_352, **FACTS | changed).split("---\n", 2)
    assert not nothing
    return yaml.safe_load(head), body


@pytest.mark.parametrize(
    ("family", "library"), [("llama", "transformers"), ("gpt2", "transformers"), ("inkstream", "inkstream")]
)
def test_card_metadata_has_only_known_fields(family: str, library: str) -> None:
    head, body = _card(family=family)
    tags = ["inkstream", family] if family != "inkstream" else ["inkstream"]
    known = {"library_name": library, "pipeline_tag": "text-generation", "tags": tags}
    assert head == {"license": "cc0-1.0", "language": "en", **known}
    assert ("from transformers" in body) == (library == "transformers")
    assert _card(metadata={"license": None, "language": None}, family=family)[0] == known
    assert _card(metadata={"language": "no"})[0]["language"] == "no", "must not be read as a boolean"


def test_card_body_has_every_figure_once_and_literal_samples() -> None:
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
    assert "The likeliest token each time, not selected" in _card(sampling=str(GREEDY_SAMPLING))[1]


def test_folders_are_hidden_unless_file_names_are_ambiguous() -> None:
    assert shorten_names(["/home/me/a.txt", "b/*.md", "-"]) == ["a.txt", "*.md", "standard input"]
    assert shorten_names(["/one/a.txt", "/two/a.txt"]) == ["/one/a.txt", "/two/a.txt"]
    assert shorten_names(["same.txt", "same.txt"]) == ["same.txt", "same.txt"]
