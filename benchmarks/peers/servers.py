"""Services side by side: each stays up, one is under load at a time; bare engines for comparison, under the same load.

The services are asked over HTTP by the load generator, both through /v1/completions; the engines in their own process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from benchmarks.level import Tally, drive
from benchmarks.peers.child import Child, ChildError
from benchmarks.peers.convert import ConvertError
from benchmarks.peers.crew import Crew, Workshop
from benchmarks.peers.install import InstallError
from benchmarks.peers.plan import BARE, OURS, Sizes, schedule
from benchmarks.peers.processes import Service, ServiceError, llama_server, our_service
from benchmarks.peers.shapes import Model
from benchmarks.plan import LoadPlan
from benchmarks.statistics import percentile

_TEMPERATURE = 0.8
_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What clients saw in one round. Milliseconds."""

    tokens_per_second: float
    first_p50: float
    first_p99: float
    gap_p50: float
    gap_p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerResult:
    """One block of the table."""

    model: str
    precision: str
    facts: dict[str, dict[str, str]]
    missing: dict[str, str]
    samples: dict[int, dict[str, dict[int, Sample]]]
    """By streams, side and round."""


class Loadable(Protocol):
    """Whatever takes a load."""

    def sample(self, plan: LoadPlan, number: int) -> Sample:
        """One level of the plan. Raises ChildError, ServiceError."""


@dataclass(frozen=True, slots=True)
class OverHTTP:
    """A service."""

    service: Service

    def sample(self, plan: LoadPlan, number: int) -> Sample:
        (streams,), requests = plan.streams, plan.requests or 0
        tally = Tally(streams=streams)
        asyncio.run(drive(plan, iter(_indices(number, requests)), tally))
        level = tally.level()
        if level.first_error:
            raise ServiceError(f"{level.errors} of {requests} requests failed: {level.first_error}")
        if level.output_tokens != requests * plan.max_tokens:
            raise ServiceError(f"asked for {requests} x {plan.max_tokens} tokens, it gave {level.output_tokens}")
        first, gap = level.first_token_ms, level.inter_token_ms
        return Sample(
            tokens_per_second=level.output_tokens_per_second,
            first_p50=first.p50 or 0,
            first_p99=first.p99 or 0,
            gap_p50=gap.p50 or 0,
            gap_p99=gap.p99 or 0,
        )


@dataclass(frozen=True, slots=True)
class InProcess:
    """An engine without a service."""

    child: Child

    def sample(self, plan: LoadPlan, number: int) -> Sample:
        (streams,), requests = plan.streams, plan.requests or 0
        prompts = [plan.prompt(index) for index in _indices(number, requests)]
        answer = self.child.ask(
            "serve", streams=streams, prompts=prompts, tokens=plan.max_tokens, temperature=plan.temperature
        )
        if answer["tokens"] != requests * plan.max_tokens:
            raise ChildError(f"asked for {requests} x {plan.max_tokens} tokens, it gave {answer['tokens']}")
        first, gaps = sorted(answer["first"]), sorted(answer["gaps"])
        return Sample(
            tokens_per_second=answer["tokens"] / answer["seconds"],
            first_p50=percentile(first, 50) * 1000,
            first_p99=percentile(first, 99) * 1000,
            gap_p50=percentile(gaps, 50) * 1000,
            gap_p99=percentile(gaps, 99) * 1000,
        )


def compare(shop: Workshop, sides: Sequence[str], model: Model, precision: str, sizes: Sizes) -> ServerResult:
    """Starts everything, measures, ends everything. What breaks is lost with its reason; the others go on."""
    crew, places, missing = Crew(), dict[str, Loadable](), dict[str, str]()
    samples: dict[int, dict[str, dict[int, Sample]]] = {streams: {} for streams in sizes.batches}
    with ExitStack() as stack:
        stack.callback(crew.dismiss)
        _start_services(shop, sides, model, precision, places, missing, stack)
        bare = [side for side in (OURS, *sides) if side in (OURS, "openvino")]
        crew.gather(shop, bare, model, precision)
        missing |= {BARE.get(side, side): reason for side, reason in crew.missing.items()}
        places |= {BARE.get(side, side): InProcess(child) for side, child in crew.children.items()}
        for number, streams, side in schedule(list(places), sizes.batches, 1 + sizes.rounds):
            if side not in places:
                continue
            try:
                sample = places[side].sample(_plan(places[side], streams, sizes), number)
            except (ChildError, ServiceError) as error:
                missing[side] = str(error)
                del places[side]
                continue
            if number:  # the first round warms up
                samples[streams].setdefault(side, {})[number] = sample
    facts = {BARE.get(side, side): facts for side, facts in crew.facts.items()}
    return ServerResult(model=model.name, precision=precision, facts=facts, missing=missing, samples=samples)


def _start_services(
    shop: Workshop,
    sides: Sequence[str],
    model: Model,
    precision: str,
    places: dict[str, Loadable],
    missing: dict[str, str],
    stack: ExitStack,
) -> None:
    makers = {OURS: our_service, "llama.cpp": llama_server}
    for side in [side for side in (OURS, *sides) if side in makers]:
        try:
            service = stack.enter_context(makers[side](shop, model, precision))
        except (InstallError, ConvertError, ServiceError) as error:
            missing[side] = str(error)
        else:
            places[side] = OverHTTP(service)


def _plan(place: Loadable, streams: int, sizes: Sizes) -> LoadPlan:
    return LoadPlan(
        url=place.service.url if isinstance(place, OverHTTP) else LoadPlan().url,
        streams=(streams,),
        requests=sizes.requests_for(streams),
        max_tokens=sizes.tokens,
        temperature=_TEMPERATURE,
        prompt_words=sizes.prompt,
        seconds=_SECONDS,
        api="openai",
    )


def _indices(number: int, requests: int) -> range:
    """No two rounds share a prompt: prefix caches have nothing to give."""
    return range(number * 1000, number * 1000 + requests)
