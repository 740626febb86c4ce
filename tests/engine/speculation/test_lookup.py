"""Drafts by lookup: what follows where the last tokens occurred before, and how likely that is to be right."""

from __future__ import annotations

import random
from array import array

import pytest

from app.common.types import Request
from app.engine.scheduling.batch_plan import Sequence
from app.engine.speculation.lookup import LookupProposer
from app.engine.speculation.proposer import Proposal


def _sequence(tokens: list[int], *, name: str = "r", namespace: str = "") -> Sequence:
    request = Request(id=name, prompt=tuple(tokens), max_tokens=10_000, cache_namespace=namespace)
    return Sequence(request=request, tokens=array("q", tokens), arrival=0)


def _written(proposer: LookupProposer, sequence: Sequence, tokens: list[int], most: int = 8) -> list[Proposal]:
    """The proposals before each of `tokens`, which the sequence then gets."""
    proposals = []
    for token in tokens:
        proposals.append(proposer.propose(sequence, most))
        sequence.tokens.append(token)
    return proposals


def test_text_that_repeats_the_prompt_is_drafted() -> None:
    prompt = [*range(20, 60), 1, 2]
    proposals = _written(LookupProposer(), _sequence(prompt), list(range(20, 60)))
    assert proposals[0] == proposals[1] == Proposal()
    assert proposals[2].tokens, "two tokens are a match"
    assert all(each.tokens[0] == 22 + i for i, each in enumerate(proposals[2:]))
    assert proposals[30].tokens == tuple(range(50, 58))


def test_periodic_text_is_drafted_beyond_its_end() -> None:
    sequence = _sequence([1, 2, 3] * 20)
    proposals = _written(LookupProposer(), sequence, [1, 2, 3] * 20)
    assert proposals[-1].tokens == (3, 1, 2, 3, 1, 2, 3, 1)


def test_chances_never_rise_and_are_one_for_each_draft() -> None:
    proposer, sequence, rng = LookupProposer(), _sequence([1, 2, 3, 4] * 8), random.Random(3)
    for proposal in _written(proposer, sequence, [rng.choice([1, 2, 3, 4]) for _ in range(500)], most=20):
        assert len(proposal.tokens) == len(proposal.chances) <= 20
        assert sorted(proposal.chances, reverse=True) == list(proposal.chances)
        assert all(0.05 <= chance < 1 for chance in proposal.chances)


def test_chances_follow_what_was_right() -> None:
    copying = _written(LookupProposer(), _sequence([*range(100, 400), 1]), list(range(100, 400)))
    rng = random.Random(4)
    chaos = _written(
        LookupProposer(), _sequence([rng.randrange(6) for _ in range(300)]), [rng.randrange(6) for _ in range(300)]
    )
    first = [proposal.chances[0] for proposal in chaos[200:] if proposal.chances]
    assert copying[-10].chances[0] > 0.95
    assert sum(first) / len(first) < 0.35, "one of six guesses is right"


def test_guesses_count_although_no_step_verified_them() -> None:
    """The proposer sees nothing but the text; whether its drafts were rows of a step makes no difference."""
    text = [1, 2, 3, 4, 5] * 40
    one, two = LookupProposer(), LookupProposer()
    drafted, plain = _sequence([1, 2, 3, 4, 5]), _sequence([1, 2, 3, 4, 5])
    _written(one, plain, text)
    for start in range(0, len(text), 4):  # four tokens of a step
        two.propose(drafted, 8)
        drafted.tokens.extend(text[start : start + 4])
    assert one.propose(plain, 8) == two.propose(drafted, 8)


def test_recent_sequences_of_the_namespace_are_drafted_from_and_no_others() -> None:
    proposer, secret = LookupProposer(), list(range(500, 600))
    ended = _sequence(secret, name="first", namespace="ann")
    proposer.propose(ended, 8)
    proposer.forget(ended)
    same = proposer.propose(_sequence([7, 500, 501, 502], name="second", namespace="ann"), 8)
    other = proposer.propose(_sequence([7, 500, 501, 502], name="third", namespace="bob"), 8)
    assert same.tokens[:2] == (503, 504)
    assert other == Proposal(), "how fast a text is written would tell what another tenant has written"


def test_drafts_end_where_a_recent_sequence_does() -> None:
    proposer = LookupProposer()
    for name, tokens in (("a", [1, 2, 3, 4, 5]), ("b", [50, 51, 52])):
        ended = _sequence(tokens, name=name)
        proposer.propose(ended, 8)
        proposer.forget(ended)
    following = _sequence([9, 2, 3, 4], name="c")
    assert proposer.propose(following, 8).tokens == (5,)
    following.tokens.append(5)
    assert proposer.propose(following, 8) == Proposal()


def test_memory_is_bounded() -> None:
    """Of 100 namespaces with 30 long sequences each, the last ones are kept, with their last sequences."""
    proposer = LookupProposer()
    for namespace in range(100):
        for number in range(30):
            start = 10_000 * number
            ended = _sequence(list(range(start, start + 5000)), name=f"{namespace}/{number}", namespace=str(namespace))
            proposer.propose(ended, 8)
            proposer.forget(ended)
    assert not proposer._lookups and len(proposer._namespaces) == 32
    kept = [index for each in proposer._namespaces.values() for index in (each._newer, each._older)]
    assert max(len(index.tokens) for index in kept) <= 1 << 15
    assert proposer.propose(_sequence([290_097, 290_098, 290_099], name="x", namespace="99"), 2).tokens == ()
    last = [294_990, 294_991, 294_992]
    assert proposer.propose(_sequence(last, name="y", namespace="99"), 2).tokens[0] == 294_993


@pytest.mark.parametrize("vocab", [4, 50, 1000])
def test_text_without_repetition_of_its_own_gets_few_expected_tokens(vocab: int) -> None:
    """Random tokens: the drafts' expected number of right ones is near the number that is right."""
    rng = random.Random(vocab)
    sequence, proposer = _sequence([rng.randrange(vocab) for _ in range(400)]), LookupProposer()
    text = [rng.randrange(vocab) for _ in range(2000)]
    proposals = _written(proposer, sequence, text, most=4)
    expected = sum(proposal.chances[0] for proposal in proposals[500:] if proposal.chances)
    n_right = sum(p.tokens[0] == token for p, token in zip(proposals[500:], text[500:], strict=True) if p.tokens)
    assert expected <= 1.5 * n_right + 20


def test_records_with_other_values_are_drafted_again_after_each_value() -> None:
    """Keys 1, 2, 3 and values that occur once: the token after a value returns to the place that the text followed."""
    rng, text = random.Random(8), list[int]()
    for _ in range(30):
        for key in ([50, 1, 51, 52], [53, 2, 51, 52], [53, 3, 51, 52]):
            text += [*key, *(rng.randrange(1000, 10**6) for _ in range(rng.randint(1, 4)))]
    sequence, proposer = _sequence(text[:300]), LookupProposer()
    proposals = _written(proposer, sequence, text[300:], most=1)
    right = [bool(p.tokens) and p.tokens[0] == token for p, token in zip(proposals, text[300:], strict=True)]
    n_keys = sum(token < 100 for token in text[300:])
    assert sum(right) >= 0.7 * n_keys, "all tokens of a key but the first can be right"
