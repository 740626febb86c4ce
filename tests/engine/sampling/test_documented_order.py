"""The pages have the sampling stages in the order in which the sampler applies them."""

from __future__ import annotations

import re

import pytest
import torch

from app.common.types import SamplingParams
from app.engine.sampling.parameters import SamplingInput
from app.engine.sampling.sampler import ADJUSTMENTS, FILTERS, sample
from tests.support import ROOT

_NAMES = {
    "logit_bias": ("logit_bias",),
    "penalties": ("repetition_penalty", "presence_penalty"),
    "grammar": ("grammar mask",),
    "min_tokens": ("min_tokens",),
    "temperature": ("temperature",),
    "top_k": ("top_k",),
    "typical_p": ("typical_p",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
}
"""Stage of the sampler -> its rows in docs/sampling.md."""


def _stages() -> list[str]:
    return [stage.name for stage in (*ADJUSTMENTS, *FILTERS)]


def test_table_of_stages_is_in_the_order_of_the_code() -> None:
    table = (ROOT / "docs/sampling.md").read_text().partition("| stage |")[2].partition("\n\n")[0]
    rows = [re.match(r"\| `?([a-z_ ]+)", line)[1].strip() for line in table.splitlines()[2:]]  # type: ignore[index]
    assert rows == [*(row for name in _stages() for row in _NAMES[name]), "draw"]


def test_sentence_about_the_order_is_in_the_order_of_the_code() -> None:
    page = " ".join((ROOT / "docs/api.md").read_text().split())
    sentence = page.partition("The order of sampling: ")[2].partition(". ")[0]
    words = {"penalties": "penalties", "grammar": "the grammar's mask"}
    expected = [words.get(name, f"`{name}`") for name in _stages()]
    assert sentence == f"log-probabilities from the raw logits; then {', '.join(expected)}, the draw"


def test_c_plus_plus_adjusts_logits_in_the_order_of_the_code() -> None:
    source = (ROOT / "app/engine/cpu/source/penalties.h").read_text().partition("inline void adjust_logits(")[2]
    calls = ("set_logit(", "penalize_repetition(", "penalize_presence(", "apply_mask(", "ban_stop_tokens(scratch")
    assert sorted(calls, key=source.index) == list(calls)


@pytest.mark.parametrize("token", [3, 5])
def test_no_bias_allows_a_masked_token_again(token: int) -> None:
    """Biases and penalties clamp to finite numbers: a mask before them would be lifted."""
    allowed = torch.tensor([1 << token], dtype=torch.int32).numpy()
    params = SamplingParams(temperature=0, logit_bias=((7, 100.0), (token, -100.0)), presence_penalty=-2)
    row = SamplingInput(params=params, tokens=[7, 7], n_prompt=1, stop_ids=(), allowed=allowed)
    (drawn,) = sample(torch.zeros(1, 32), [row])
    assert drawn.token == token
