"""Checks of an engine before its first request: finite logits, golden.json, batch invariance if --deterministic.

The checks use everything that requests use: cache, kernels, rounded weights. A transposed matrix, a missing scale or
another layout of heads loads without an error and produces nonsense; weights that overflow also load, and produce no
tokens at all. `inkstream check`, the start and a reload all check finite logits and golden.json.

For batch invariance a few short prompts are computed alone, together, in another order, in small chunks and in a large
batch. Every log-probability must be bitwise equal, and therefore every token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from app.common.types import Request, RequestFailed, SamplingParams
from app.engine.execution.engine import Engine
from app.engine.scheduling.scheduler import NOT_FINITE, StepLimits
from model.cache_formats import KvCache, golden_tolerance
from model.checkpoint.golden import GOLDEN_FILE, read_golden
from model.checkpoint.tensor_index import weight_files
from model.config import ModelConfig
from model.files import CheckpointError
from model.weight_formats import KINDS
from model.weights_version import Directory

_TRIAL = "trial prompt"
_TRIAL_TOKENS = 3
"""Tokens that are generated after each trial prompt, so that decode steps follow the prefill."""
_BEYOND_A_BLOCK = 8


@dataclass(slots=True)
class _Answer:
    """Results of one prompt."""

    scores: list[float] = field(default_factory=list)
    sampled: list[tuple[int | None, float | None]] = field(default_factory=list)

    def difference(self, other: _Answer) -> str | None:
        """Description of the first difference, if there is one."""
        pairs = zip(self.scores, other.scores, strict=True)
        for index, (ours, theirs) in enumerate(pairs, start=2):
            if ours != theirs:
                return f"the log-probability of its token {index} is {theirs!r} and alone {ours!r}"
        for index, (one, another) in enumerate(zip(self.sampled, other.sampled, strict=True), start=1):
            if one != another:
                return f"token {index} after it is {another[0]} ({another[1]!r}) and alone {one[0]} ({one[1]!r})"
        return None


def _run(engine: Engine, requests: Sequence[Request]) -> tuple[dict[str, _Answer], Sequence[RequestFailed]]:
    """Results of all requests, and those that failed."""
    answers, failed = {request.id: _Answer() for request in requests}, list[RequestFailed]()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        report = engine.step()
        failed += report.failed
        for scores in report.scores:
            answers[scores.request_id].scores += [own for own, _top in scores.tokens]
        for event in report.events:
            answers[event.request_id].sampled.append((event.token, event.logprob))
    return answers, failed


def check_finite_logits(
    engine: Engine, directory: Directory, config: ModelConfig, *, context: int, number_format: str, start_id: int | None
) -> None:
    """Raises CheckpointError if the engine cannot continue every trial prompt.

    `engine` is idle before and after; `context` is its longest sequence; `number_format` is the kind of the weights'
    format; `start_id` is the token that starts a text without a prompt.
    """
    length = min(context, engine.scheduler.pool.block_size + _BEYOND_A_BLOCK)
    spread = tuple(index * (config.vocab_size - 1) // max(1, length - 1) for index in range(length))
    requests = [
        Request(
            id=f"{_TRIAL} {index}",
            prompt=prompt,
            max_tokens=max(0, min(_TRIAL_TOKENS, context - len(prompt))),
            params=SamplingParams(temperature=0.0),
            prompt_logprobs=0,
            source=prompt if config.n_encoder_layers else (),
            cache_namespace=_TRIAL,
        )
        for index, prompt in enumerate([(start_id or 0,), spread])
    ]
    if failed := _run(engine, requests)[1]:
        raise CheckpointError(f"{weight_files(directory)[0]}: {_problem(failed[0], number_format)}")


def check_golden(
    engine: Engine,
    directory: Directory,
    config: ModelConfig,
    *,
    context: int,
    number_format: str,
    kv_cache: KvCache = "auto",
) -> str:
    """Compares the engine with golden.json and returns the result for the log. Raises CheckpointError if they differ.

    Takes the arguments of check_finite_logits(); `config` has the whole context of the model, and `kv_cache`
    is the format of the cache.
    """
    golden = read_golden(directory, config)
    if golden is None:
        return f"no {GOLDEN_FILE}, which is optional"
    if any(rope.is_long(context) != rope.is_long(config.context) for rope in config.ropes):
        return f"{GOLDEN_FILE} has the long_factors of the model's whole context"
    prompt = golden.prompt[:context]
    # An encoder needs the whole prompt for the first token already.
    if len(prompt) < 2 or (config.n_encoder_layers and prompt != golden.prompt):
        return f"{GOLDEN_FILE} is longer than --max-context"
    source = prompt if config.n_encoder_layers else ()
    # A separate cache namespace, so that no other request finds these cached blocks.
    request = Request(
        id=GOLDEN_FILE, prompt=prompt, max_tokens=0, prompt_logprobs=0, source=source, cache_namespace=GOLDEN_FILE
    )
    answers, failed = _run(engine, [request])
    if failed:
        raise CheckpointError(f"{golden.path}: {_problem(failed[0], number_format)}")
    logprobs = answers[request.id].scores
    if tolerance := golden_tolerance(KINDS[number_format].golden_tolerance, kv_cache):
        difference = golden.compare_rounded(logprobs, relative_tolerance=tolerance)
        return f"{GOLDEN_FILE} passed, mean difference {difference:.1e}, {golden.loss(logprobs):+.2%} bits per byte"
    return f"{GOLDEN_FILE} passed, largest difference {golden.compare(logprobs):.1e}"


def _problem(failed: RequestFailed, number_format: str) -> str:
    if failed.message != NOT_FINITE:
        return f"the engine cannot continue a trial prompt in {number_format}: {failed.message}"
    advice = (
        ""
        if number_format == "float32"
        else "; if inkstream check accepts the weights, serve them with --dtype float32"
    )
    return f"with these weights the engine's logits are not finite in {number_format}{advice}"


_LENGTHS = (3, 17, 40, 75)
_NEW_TOKENS = 6
"""Tokens that are generated after each prompt."""
_CHUNK = 16
_LARGE_BATCH = 32


class BatchVarianceError(ValueError):
    """Concurrent requests changed a result; the message says which one."""


def check_batch_invariance(
    make_engine: Callable[[StepLimits], Engine], limits: StepLimits, config: ModelConfig, *, context: int
) -> str:
    """Runs the check and returns its result for the log. Raises BatchVarianceError.

    make_engine: returns an idle engine with an empty cache, whose limits are at most `limits`; engines that it returned
    before are no longer used.
    """

    def answers_of(limits: StepLimits, requests: list[Request]) -> dict[str, _Answer]:
        answers, failed = _run(make_engine(limits), requests)
        if failed:
            raise BatchVarianceError(f"--deterministic cannot be verified on this device: {failed[0].message}")
        return answers

    requests = list(_requests(config, context, _LENGTHS))
    alone = {request.id: answers_of(limits, [request])[request.id] for request in requests}
    lengths = [1 + index % 5 for index in range(min(_LARGE_BATCH, limits.max_running) - len(requests))]
    others = list(_requests(config, context, lengths, name="other"))
    for arrangement, arranged_limits, batch in _arrangements(limits, requests, others):
        answers = answers_of(arranged_limits, batch)
        for request in requests:
            if difference := alone[request.id].difference(answers[request.id]):
                raise BatchVarianceError(
                    f"--deterministic cannot be guaranteed on this device: computed {arrangement}, the prompt of "
                    f"{len(request.prompt)} tokens gives another result, {difference}; start without it"
                )
    n_numbers = sum(len(answer.scores) + len(answer.sampled) for answer in alone.values())
    return f"batch invariance verified: {n_numbers} log-probabilities equal alone, together, in chunks, in a full batch"


def _arrangements(
    limits: StepLimits, requests: list[Request], others: list[Request]
) -> Iterator[tuple[str, StepLimits, list[Request]]]:
    n_running = min(len(requests), limits.max_running)
    chunk = min(max(_CHUNK, n_running), limits.tokens_per_step)
    yield "together with others", limits, requests
    yield "in another order", limits, requests[::-1]
    yield "in small chunks", replace(limits, max_running=n_running, tokens_per_step=chunk), requests
    yield f"in a batch of {len(requests) + len(others)}", limits, [*others[::2], *requests, *others[1::2]]


def _requests(config: ModelConfig, context: int, lengths: Sequence[int], name: str = "row") -> Iterator[Request]:
    random, new_tokens = Random(name), min(_NEW_TOKENS, context // 2)
    for index, length in enumerate(lengths):
        prompt = tuple(random.randrange(config.vocab_size) for _ in range(min(length, context - new_tokens)))
        yield Request(
            id=f"{name} {index}",
            prompt=prompt,
            max_tokens=new_tokens,
            params=SamplingParams(temperature=index % 2, seed=index, logprobs=0),
            prompt_logprobs=0,
            source=prompt if config.n_encoder_layers else (),
        )
