"""samples.md, its sampling, and text that Markdown must not interpret as markup."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.common.types import SamplingParams
from app.engine.sampling.parameters import SamplingInput
from app.engine.sampling.sampler import ADJUSTMENTS, apply_stages, row_parameters
from model.nn.transformer import Decoder
from model.tokenizer.tokenizer import Tokenizer
from model.train.data.batch import batch_of_windows
from model.train.data.examples import Prompt
from model.train.reporting.report import STAGES, Report
from model.train.reporting.samples import Sample, plain, quoted, samples_page, visible
from model.train.sampling import DEFAULT_SAMPLING, _penalised, generate_samples
from model.train.step.objective import Objective
from tests.model.train.reporting.test_report import OUTLINE, progress
from tests.support.model.tiny_models import TEXT, tiny_config

pytestmark = pytest.mark.slow

PROMPTS = ["Once upon", "\u201cWhere?\u201d"]


def _draw(text: str) -> list[Sample]:
    return [Sample(prompt=prompt, full_text=f"{prompt} {text}") for prompt in PROMPTS]


def _run(out: Path, first: int, last: int, *, seconds_a_step: float = 1000.0) -> list[int]:
    """Steps of a run of 100. Returns those that drew."""
    drawn: list[int] = []

    def draw(step: int) -> list[Sample]:
        drawn.append(step)
        return _draw(f"text of {step}")

    with Report(out, OUTLINE, start_step=first - 1, report_seconds=60) as report:
        for step in range(first, last + 1):
            report.step(progress(step, of=100, seconds=seconds_a_step * step))
            if step % 5 == 0:
                report.held_out(step, 2.0 - step / 100)
            report.sample(lambda step=step: draw(step))
        if last == 100:
            report.finish(0.9, _draw("the end"))
    return drawn


def test_texts_are_drawn_at_each_stage_and_at_the_end(tmp_path: Path) -> None:
    assert _run(tmp_path, 1, 100) == [round(100 * stage) for stage in STAGES]
    page = (tmp_path / "samples.md").read_text()
    bits = "training bits per byte 1.4427"  # of 2 nats a target, which has two bytes
    assert f"**1 %**, step 1, {bits}:" in page, "nothing was measured yet"
    assert f"**5 %**, step 5, {bits}, held-out bits per byte 1.9500:" in page
    assert f"**100 %**, step 100, {bits}, held-out bits per byte 0.9000:" in page
    first, second = page.split("## ")[1:]
    assert first.startswith("Once upon\n") and second.startswith("\u201cWhere?\u201d\n")
    positions = [first.index(f"> Once upon {text}  \n") for text in ("text of 1", "text of 5", "text of 50", "the end")]
    assert positions == sorted(positions)


def test_a_run_that_went_on_has_the_samples_of_one_that_was_never_interrupted(tmp_path: Path) -> None:
    _run(tmp_path / "whole", 1, 100)
    _run(tmp_path / "halves", 1, 60)
    _run(tmp_path / "halves", 11, 12)  # the snapshot was of step 10: what came later is drawn again
    assert "text of 5 " in (tmp_path / "halves/samples.md").read_text()
    assert "text of 20" not in (tmp_path / "halves/samples.md").read_text()
    _run(tmp_path / "halves", 13, 100)
    assert (tmp_path / "halves/samples.md").read_text() == (tmp_path / "whole/samples.md").read_text()
    _run(tmp_path / "halves", 1, 1, seconds_a_step=0.001)
    assert not (tmp_path / "halves/samples.md").exists(), "another run forgets them"


def test_drawing_takes_a_hundredth_of_the_time_so_far_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing is assumed to take half a second at first; then the last one counts."""
    now = [0.0]
    monkeypatch.setattr("model.train.reporting.report.time.monotonic", lambda: now[0])

    def draw() -> list[Sample]:
        now[0] += 3.0
        return _draw("text")

    drawn = []
    with Report(tmp_path, OUTLINE, start_step=0, report_seconds=60) as report:
        for step in range(1, 1000):
            before = now[0]
            report.step(progress(step, of=1000))
            report.sample(draw)
            drawn += [step] * (now[0] > before)
    assert drawn == [50, 300, 500]


def test_drawing_again_gives_the_same_texts_and_leaves_nothing_behind() -> None:
    """Neither randomness nor what inference mode has made: training goes on."""
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


def test_the_penalty_is_the_service_s() -> None:
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
def test_what_came_is_shown_and_not_taken_for_markup(text: str, shown: str) -> None:
    assert plain(text) == shown
    assert visible("a\x1b[2J\x07\r\0b\tc\n\u201cd\u201d") == "a\ufffd[2J\ufffd\ufffd\ufffdb\tc\n\u201cd\u201d"
    assert quoted("\nOne,\n\n    > two\n") == "> One,  \n>\n> \\> two  "


def test_a_resumed_run_may_have_other_prompts() -> None:
    old = {"step": 1, "fraction": 0.1, "bits_per_byte": 1.0, "samples": {"One": "One day"}}
    new = {**old, "step": 2, "samples": {"Two": "Two went", "One": "One night"}}
    page = samples_page([old, new], title="t", measured="held-out")
    assert page.index("> Two went") < page.index("> One day") < page.index("> One night")
