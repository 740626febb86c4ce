"""Whether an engine says of a text what its model said when it was written: golden.json, before the first request.

The whole way is tried that requests take: cache, kernels, rounded weights. A matrix that is transposed, a lost scaling
or another layout of heads loads without complaint and answers nonsense; this is where it is found out.
"""

from __future__ import annotations

from pathlib import Path

from app.engine.engine import Engine
from app.engine.types import Request
from model.config import ModelConfig
from model.files import CheckpointError
from model.golden import GOLDEN_FILE, read_golden

_SHARES = {"bfloat16": 0.05, "int8": 0.1, "fp8": 0.15}
"""What rounding may cost; measured 0.3 %, 0.8 % and 2.0 % with the default weights, 2 %, 5 % and 5 % with loud random
ones (fp8 emulated on a CPU)."""


def prove(engine: Engine, directory: Path, config: ModelConfig, *, context: int, number: str) -> str:
    """What came of it, for the log. Raises CheckpointError where the engine says something else.

    `engine` is idle and stays so; `context` is the longest sequence that it takes; it computes in numbers of this kind:
    float32, bfloat16, int8, fp8.
    """
    golden = read_golden(directory, config)
    if golden is None:
        return f"no {GOLDEN_FILE}"
    prompt = golden.prompt[:context]
    # An encoder reads all of it for the first token already.
    if len(prompt) < 2 or (config.n_encoder_layers and prompt != golden.prompt):
        return f"{GOLDEN_FILE} is longer than --max-context"
    logprobs = _logprobs(engine, prompt, has_encoder=config.n_encoder_layers > 0)
    if logprobs is None:
        raise CheckpointError(f"{golden.path}: the engine's logits for its prompt are not finite")
    if share := _SHARES.get(number):
        return f"{GOLDEN_FILE} met, mean difference {golden.compare_rounded(logprobs, share=share):.1e}"
    return f"{GOLDEN_FILE} met, largest difference {golden.compare(logprobs):.1e}"


def _logprobs(engine: Engine, prompt: tuple[int, ...], *, has_encoder: bool) -> list[float] | None:
    """Of each token but the first; None where they are not finite."""
    source = prompt if has_encoder else ()
    # A salt of its own: nobody's request finds what this one leaves in the cache.
    engine.add(Request(id=GOLDEN_FILE, prompt=prompt, max_tokens=0, prompt_logprobs=0, source=source, salt=GOLDEN_FILE))
    logprobs: list[float] = []
    while engine.has_work:
        report = engine.step()
        if report.failed:
            return None
        logprobs += [own for scores in report.scores for own, _ in scores.tokens]
    return logprobs
