"""Receipt: what determines a text, as a response reports it, and as a client sends it back to resume the text."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from app.common.errors import ResumeRefused
from app.common.ipc import Ready
from app.common.model_version import Version
from app.common.types import SamplingParams
from app.generation.request import GenerationRequest, Prompt

SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
GRAMMAR_FIELDS = ("regex", "json_schema", "grammar")


def settings(request: GenerationRequest, params: SamplingParams) -> dict[str, Any]:
    """The effective settings, under the names of the request's fields."""
    grammar = dict([request.grammar]) if request.grammar else {}
    return {
        **{name: getattr(params, name) for name in SAMPLING_FIELDS},
        "logit_bias": {str(token_id): bias for token_id, bias in request.logit_bias},
        "max_tokens": request.max_tokens,
        "min_tokens": request.min_tokens,
        "n": request.n,
        "stop": list(request.stops),
        "stop_token_ids": list(request.stop_token_ids),
        "include_stop": request.include_stop,
        "ignore_eos": request.ignore_eos,
        "logprobs": request.logprobs,
        "echo": request.echo,
        "truncate_prompt_tokens": request.truncate_prompt_tokens,
        "vary_equal_prompts": request.is_batch and request.varies_equal_prompts,
        **{name: grammar.get(name) for name in GRAMMAR_FIELDS},
    }


def prompt_hashes(request: GenerationRequest) -> dict[str, str | list[str] | None]:
    """SHA-256 of prompts, source and suffix, under the names of the receipt's fields."""
    prompts = [_sha256(prompt) for prompt in request.prompts]
    return {
        "prompt_sha256": prompts if request.is_batch else prompts[0],
        "source_sha256": None if request.source is None else _sha256(request.source),
        "suffix_sha256": None if request.suffix is None else _sha256(request.suffix),
    }


def _sha256(prompt: Prompt) -> str:
    """Of the text in UTF-8, or of the ids in decimal with commas."""
    text = prompt if isinstance(prompt, str) else ",".join(map(str, prompt))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def fingerprint(version: Version, numerics: str) -> str:
    """Weights and numerics, shortened: OpenAI's system_fingerprint."""
    return f"{version.short_key}-{numerics}"


def check_receipt(receipt: Mapping[str, Any], request: GenerationRequest, params: SamplingParams, ready: Ready) -> None:
    """Raises ResumeRefused for the first field of a client's receipt that is another one here."""
    own: dict[str, Any] = {
        "weights_version": ready.model_version.key,
        "numerics": ready.numerics,
        "system_fingerprint": fingerprint(ready.model_version, ready.numerics),
        **prompt_hashes(request),
        "seed": params.seed,
        **{f"settings.{name}": value for name, value in settings(request, params).items()},
    }
    given = {name: value for name, value in receipt.items() if name != "settings"}
    given |= {f"settings.{name}": value for name, value in receipt.get("settings", {}).items()}
    for name in [*own, *given]:
        if name in given and (name not in own or given[name] != own[name]):
            theirs, ours = f"{given[name]!r:.80}", f"{own.get(name)!r:.80}"
            raise ResumeRefused(
                f"resume.receipt: {name[:60]} is {theirs}, and here it is {ours}: send the body of the first request "
                "to a service with the same weights and numerics",
                f"resume.receipt.{name[:60]}",
                "receipt_mismatch",
            )
