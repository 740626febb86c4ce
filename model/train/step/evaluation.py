"""Evaluation: bits per byte of text that the decoder is not trained on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice

from model.train.data.batch import IGNORE_INDEX, Batch
from model.train.step.objective import Objective
from model.train.step.thread_pool import run_each

_GROUP = 32
"""Batches evaluated between checks for a stop."""


def bits_per_byte(objective: Objective, batches: Iterable[Batch], bytes_of: Sequence[bytes]) -> float:
    """Bits needed per byte of the targets' text; on a CPU, one batch per thread."""
    nats, n_bytes, remaining = 0.0, 0, iter(batches)
    measure = partial(_measure, objective, bytes_of)
    while group := list(islice(remaining, _GROUP)):
        measured = run_each(measure, group) if objective.device.type == "cpu" else map(measure, group)
        for batch_nats, batch_bytes in measured:
            nats, n_bytes = nats + batch_nats, n_bytes + batch_bytes
    return nats / math.log(2) / max(n_bytes, 1)


def _measure(objective: Objective, bytes_of: Sequence[bytes], batch: Batch) -> tuple[float, int]:
    """(nats, bytes of text) of the targets."""
    targets = batch.targets_RN[batch.targets_RN.ne(IGNORE_INDEX)].tolist()
    return objective.nats(batch), sum(len(bytes_of[token]) for token in targets)
