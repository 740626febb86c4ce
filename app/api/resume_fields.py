"""The field `resume` of a request: what the client has of a response whose stream broke, and a receipt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from app.api.schemas import MAX_PROMPTS, Natural, RequestBody, Seed, TokenIds
from app.generation.request import GenerationRequest, ReceivedChoice, Resumption

_MAX_CHOICES = 64 * MAX_PROMPTS
_MAX_NUMBER = 10**9 - 2
"""Numbers in the ids of events have up to nine digits."""


class ReceivedFields(RequestBody):
    """What arrived of one choice."""

    model_config = ConfigDict(strict=True, extra="forbid")

    text: str = Field(description="All of its text that arrived; an echoed prompt is part of it.")
    token_ids: TokenIds | None = Field(
        None,
        description="All ids that arrived (return_token_ids). The service continues from them; without them it "
        "computes the text again, and sends what comes after `text`.",
    )
    logprobs: Natural | None = Field(
        None,
        description="How many tokens arrived with log-probabilities, those of an echoed prompt included; if the "
        "request has logprobs.",
    )


class ReceivedChunks(ReceivedFields):
    """What arrived of one choice in chunks."""

    finish_reason: str | None = Field(None, max_length=64, description="How it ended, if that arrived.")


class StartReceipt(RequestBody):
    """The data of the event `start`, as it arrived. Its other fields are not compared."""

    weights_version: str = Field(max_length=200, description="SHA-256 of the weights.")
    numerics: str = Field(max_length=200, description="Backend and number format.")
    seed: Seed = Field(description="Seed of the random numbers.")
    settings: dict[str, Any] = Field(description="Effective settings.")
    prompt_sha256: str | list[str] = Field(description="SHA-256 of the prompt, or a list of several.")
    source_sha256: str | None = Field(None, description="SHA-256 of the source.")
    suffix_sha256: str | None = Field(None, description="SHA-256 of the suffix.")


class ChunkReceipt(RequestBody):
    """From any chunk. Its other fields are not compared."""

    system_fingerprint: str = Field(max_length=400, description="Weights and numerics.")
    seed: Seed = Field(description="Seed of the random numbers.")


class Resume(RequestBody):
    """Goes on with a stream of /complete that broke; see docs/api.md."""

    model_config = ConfigDict(strict=True, extra="forbid")

    after: Annotated[int, Field(ge=0, le=_MAX_NUMBER)] = Field(
        description="Number of the last event that arrived. The first event of this stream has the next one."
    )
    receipt: StartReceipt = Field(description="The data of the event `start`, as it arrived.")
    choices: list[ReceivedFields] = Field(
        min_length=1, max_length=_MAX_CHOICES, fail_fast=True, description="What arrived of each choice, by index."
    )


class ResumeChunks(RequestBody):
    """Goes on with a stream of /v1/completions that broke; see docs/api.md."""

    model_config = ConfigDict(strict=True, extra="forbid")

    receipt: ChunkReceipt = Field(description="Any chunk that arrived, or its `system_fingerprint` and `seed`.")
    choices: list[ReceivedChunks] = Field(
        min_length=1, max_length=_MAX_CHOICES, fail_fast=True, description="What arrived of each choice, by index."
    )


def resumed(
    request: GenerationRequest, receipt: StartReceipt | ChunkReceipt, choices: Sequence[ReceivedFields]
) -> GenerationRequest:
    """The request with what its client has, and with the seed of the receipt unless the body names one."""
    received = tuple(
        ReceivedChoice(
            name=f"resume.choices[{index}]",
            text=choice.text,
            token_ids=tuple(choice.token_ids or ()),
            n_logprobs=choice.logprobs,
            is_finished=isinstance(choice, ReceivedChunks) and choice.finish_reason is not None,
        )
        for index, choice in enumerate(choices)
    )
    seed = receipt.seed if request.seed is None else request.seed
    return replace(request, seed=seed, resumption=Resumption(receipt=receipt.model_dump(), choices=received))
