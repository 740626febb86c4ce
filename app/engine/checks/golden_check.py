"""Checks an engine before its first request: finite logits on trial prompts, and the log-probabilities of golden.json.

The check uses everything that requests use: cache, kernels, rounded weights. A transposed matrix, a missing scale or
another layout of heads loads without an error and produces nonsense; weights that overflow also load, and produce no
tokens at all. `inkstream check`, the start and a reload all run these two functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from app.common.types import Request, RequestFailed, SamplingParams
from app.engine.execution.engine import Engine
from app.engine.scheduling.scheduler import NOT_FINITE
from model.checkpoint.golden import GOLDEN_FILE, read_golden
from model.checkpoint.tensor_index import INDEX_FILE, WEIGHTS_FILE
from model.config import ModelConfig
from model.files import CheckpointError, entry_exists

_TOLERANCES = {"bfloat16": 0.05, "int8": 0.1, "fp8": 0.15}
"""Largest relative difference due to rounding; measured 0.3 %, 0.8 % and 2.0 % with the default weights, 2 %, 5 % and
5 % with random weights of large scale (fp8 emulated on a CPU)."""

_TRIAL = "trial prompt"
_NEW_TOKENS = 3
"""Tokens that are generated after each trial prompt, so that decode steps follow the prefill."""
_BEYOND_A_BLOCK = 8


def check_finite_logits(
    engine: Engine, directory: Path, config: ModelConfig, *, context: int, number_format: str, start_id: int | None
) -> None:
    """Raises CheckpointError if the engine cannot continue every trial prompt.

    `engine` is idle before and after; `context` is its longest sequence; `number_format` is float32, bfloat16, int8 or
    fp8; `start_id` is the token that starts a text without a prompt.
    """
    length = min(context, engine.scheduler.pool.block_size + _BEYOND_A_BLOCK)
    prompts = trial_prompts(config.vocab_size, length=length, start_id=start_id)
    requests = [
        Request(
            id=f"{_TRIAL} {index}",
            prompt=prompt,
            max_tokens=max(0, min(_NEW_TOKENS, context - len(prompt))),
            params=SamplingParams(temperature=0.0),
            prompt_logprobs=0,
            source=prompt if config.n_encoder_layers else (),
            cache_namespace=_TRIAL,
        )
        for index, prompt in enumerate(prompts)
    ]
    if failed := _run(engine, requests)[1]:
        weights = directory / (WEIGHTS_FILE if entry_exists(directory / WEIGHTS_FILE) else INDEX_FILE)
        raise CheckpointError(f"{weights}: {_problem(failed[0], number_format)}")


def trial_prompts(vocab_size: int, *, length: int, start_id: int | None) -> list[tuple[int, ...]]:
    """Two prompts: the start of a text, and `length` ids that span the vocabulary."""
    return [(start_id or 0,), tuple(index * (vocab_size - 1) // max(1, length - 1) for index in range(length))]


def check_golden(engine: Engine, directory: Path, config: ModelConfig, *, context: int, number_format: str) -> str:
    """Compares the engine with golden.json and returns the result for the log. Raises CheckpointError if they differ.

    The arguments are those of check_finite_logits().
    """
    golden = read_golden(directory, config)
    if golden is None:
        return f"no {GOLDEN_FILE}"
    prompt = golden.prompt[:context]
    # An encoder needs the whole prompt for the first token already.
    if len(prompt) < 2 or (config.n_encoder_layers and prompt != golden.prompt):
        return f"{GOLDEN_FILE} is longer than --max-context"
    source = prompt if config.n_encoder_layers else ()
    # A separate cache namespace, so that no other request finds these cached blocks.
    request = Request(
        id=GOLDEN_FILE, prompt=prompt, max_tokens=0, prompt_logprobs=0, source=source, cache_namespace=GOLDEN_FILE
    )
    logprobs, failed = _run(engine, [request])
    if failed:
        raise CheckpointError(f"{golden.path}: {_problem(failed[0], number_format)}")
    if tolerance := _TOLERANCES.get(number_format):
        difference = golden.compare_rounded(logprobs, relative_tolerance=tolerance)
        return f"{GOLDEN_FILE} passed, mean difference {difference:.1e}"
    return f"{GOLDEN_FILE} passed, largest difference {golden.compare(logprobs):.1e}"


def _run(engine: Engine, requests: Sequence[Request]) -> tuple[list[float], Sequence[RequestFailed]]:
    """Log-probabilities of the prompts' tokens, and the requests that failed."""
    for request in requests:
        engine.add(request)
    logprobs: list[float] = []
    failed: list[RequestFailed] = []
    while engine.has_work:
        report = engine.step()
        failed += report.failed
        logprobs += [own for scores in report.scores for own, _ in scores.tokens]
    return logprobs, failed


def _problem(failed: RequestFailed, number_format: str) -> str:
    if failed.message != NOT_FINITE:
        return f"the engine cannot continue a trial prompt in {number_format}: {failed.message}"
    advice = (
        ""
        if number_format == "float32"
        else "; if inkstream check accepts the weights, serve them with --dtype float32"
    )
    return f"with these weights the engine's logits are not finite in {number_format}{advice}"
