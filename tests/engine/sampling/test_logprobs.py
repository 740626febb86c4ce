"""Log-probabilities: independent of other rows, most likely first, lower id first among equals."""

from __future__ import annotations

import pytest
import torch

from app.engine.sampling.sampler import top_logprobs

pytestmark = pytest.mark.usefixtures("one_thread")


def _logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [2, 7, 99, 320, 4099])
def test_the_best_are_those_of_a_full_sort(vocab: int, dtype: torch.dtype) -> None:
    """In bfloat16 many are equal, also across the edge of those that are shown."""
    logits = _logits(40, vocab, dtype)
    chosen = torch.arange(40) % vocab
    for count in (0, 1, 5, 20):
        for row, (own, top) in enumerate(top_logprobs(logits, chosen, [count] * 40)):
            logprobs = logits[row].float().log_softmax(-1).tolist()
            best = sorted(enumerate(logprobs), key=lambda pair: (-pair[1], pair[0]))
            assert list(top) == best[:count]
            assert own == logprobs[chosen[row]]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("vocab", [99, 4099, 50257])
def test_a_row_does_not_know_its_company(vocab: int, threads: int) -> None:
    torch.set_num_threads(threads)
    logits, chosen = _logits(21, vocab), torch.arange(21)
    alone = [top_logprobs(logits[i : i + 1].clone(), chosen[i : i + 1], [20])[0] for i in range(21)]
    for rows in (2, 3, 8, 21):
        assert top_logprobs(logits[:rows], chosen[:rows], [20] * rows) == alone[:rows]
    assert top_logprobs(logits[5:], chosen[5:], [20] * 16) == alone[5:]
