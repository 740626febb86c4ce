"""Random sequences for the native executor, and the logits that it computes of them."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence as Items

from app.common.types import Request, SamplingParams
from app.engine.cpu.executor import NativeExecutor
from app.engine.cpu.packed_decoder import BLOCK
from app.engine.scheduling.batch_plan import BatchPlan, Chunk, Sequence
from model.number_formats import Array


def random_sequence(n_tokens: int, vocab: int = 320, *, seed: int | None = None, first_block: int = 0) -> Sequence:
    """A sequence in consecutive blocks. seed: of its tokens; their number by default."""
    rng = random.Random(n_tokens if seed is None else seed)
    tokens = array("q", (rng.randrange(vocab) for _ in range(n_tokens)))
    request = Request(id=f"{seed}-{first_block}", prompt=tuple(tokens), max_tokens=1, params=SamplingParams())
    blocks = array("i", range(first_block, first_block + -(-n_tokens // BLOCK)))
    return Sequence(request=request, tokens=tokens, arrival=0, blocks=(blocks,))


def run_chunk(executor: NativeExecutor, sequence: Sequence, start: int, stop: int) -> Array:
    """float32 logits [T, V] of one chunk."""
    executor.run(BatchPlan((Chunk(sequence, start, stop),)))
    return executor.logits(range(stop - start)).copy()


def logits_of(executor: NativeExecutor, tokens: Items[int]) -> Array:
    """float32 logits [T, V] of a sequence with these tokens."""
    sequence = random_sequence(len(tokens), 1)
    sequence.tokens[:] = array("q", tokens)
    return run_chunk(executor, sequence, 0, len(tokens))
