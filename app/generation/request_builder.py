"""Builds engine requests, one per continuation, and their output choices from a generation request."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from app.common.errors import InvalidRequest
from app.common.ipc import Ready
from app.common.params import SamplingParams
from app.common.types import Request
from app.generation.output_choice import OutputChoice, PromptEcho, TextRules
from app.generation.prompt_encoder import EncodedPrompt
from app.generation.request import GenerationRequest
from model.tokenizer.tokenizer import Tokenizer

_MOST_LOGPROBS = 200_000
NEUTRAL = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class BuiltRequests:
    """All sequences of one generation request: choice i of prompt p has the index p * n + i."""

    def __init__(self, name: str, wish: GenerationRequest, ready: Ready, tokenizer: Tokenizer, salt: str) -> None:
        self._name = name
        self._wish = wish
        self._ready = ready
        self._tokenizer = tokenizer
        self._salt = salt
        self._eos_ids = () if wish.ignore_eos else tokenizer.end_ids(ready.eos_ids)

    def _check_size(self, reads: Sequence[EncodedPrompt]) -> None:
        """Raises InvalidRequest if the response would hold too many log-probabilities."""
        wish, context = self._wish, self._ready.context
        if wish.logprobs is None:
            return
        each = 1 + wish.logprobs
        drawn = 0 if wish.is_streamed else wish.max_tokens
        lengths = [(len(read.ids) if wish.echo else 0) + min(drawn, context - len(read.ids)) for read in reads]
        size = sum(lengths) * wish.n_drawn * each
        limit = max(_MOST_LOGPROBS, context * each)
        if size > limit:
            raise InvalidRequest(
                f"logprobs: the answer could hold {size} log-probabilities, at most {limit} are told at once: "
                "ask for fewer prompts, a smaller n, fewer tokens, or smaller logprobs",
                "logprobs",
            )

    def requests(self, reads: Sequence[EncodedPrompt], source: tuple[int, ...], guide: str = "") -> list[Request]:
        """The engine requests. Raises InvalidRequest."""
        wish = self._wish
        self._check_vocabulary()
        self._check_size(reads)
        if wish.min_tokens > wish.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({wish.min_tokens}) must not be above max_tokens ({wish.max_tokens})", "min_tokens"
            )
        params = self._params()
        requests = []
        for prompt, read in enumerate(reads):
            leader = Request(
                id=self._id(prompt * wish.n_drawn, len(reads)),
                prompt=read.ids,
                max_tokens=min(wish.max_tokens, self._ready.context - len(read.ids)),
                params=params,
                source=source,
                stop_ids=tuple(dict.fromkeys((*self._eos_ids, *wish.stop_token_ids))),
                prompt_logprobs=wish.logprobs if wish.echo else None,
                guide=guide,
                salt=self._salt,
            )
            requests.append(leader)
            for choice in range(1, wish.n_drawn):
                requests.append(
                    replace(
                        leader,
                        id=self._id(prompt * wish.n_drawn + choice, len(reads)),
                        params=replace(params, choice=choice),
                        prompt_logprobs=None,
                        leader=leader.id,
                    )
                )
        return requests

    def choices(self, requests: Sequence[Request], reads: Sequence[EncodedPrompt]) -> list[OutputChoice]:
        """The output choices that consume the events of `requests`."""
        wish = self._wish
        rules = TextRules(wish.stops, wish.include_stop, wish.min_tokens, frozenset(self._eos_ids))
        echoes = [self._echo(read) if wish.echo else None for read in reads]
        return [
            OutputChoice(place, request, self._tokenizer, rules, echoes[place // wish.n_drawn])
            for place, request in enumerate(requests)
        ]

    def _echo(self, read: EncodedPrompt) -> PromptEcho:
        return PromptEcho(read.text, read.ids, self._tokenizer, is_scored=self._wish.logprobs is not None)

    def _params(self) -> SamplingParams:
        """The request's values, or the model's defaults, or no filter; a random seed if none was given."""
        wish = self._wish
        asked = {name: value for name, value in wish.sampling.items() if value is not None}
        defaults = self._ready.sampling_defaults if wish.use_model_defaults else {}
        chosen: dict[str, Any] = {**NEUTRAL, **defaults, **asked}
        # best_of ranks by the log-probabilities of the sampled tokens.
        logprobs = 0 if wish.logprobs is None and wish.ranks else wish.logprobs
        return SamplingParams(
            **{**chosen, "top_k": max(0, int(chosen["top_k"]))},
            logit_bias=wish.logit_bias,
            min_tokens=wish.min_tokens,
            seed=secrets.randbits(53) if wish.seed is None else wish.seed,  # 53 bits survive every JSON parser
            logprobs=logprobs,
        )

    def _check_vocabulary(self) -> None:
        size = self._ready.vocab_size
        named = {"stop_token_ids": self._wish.stop_token_ids, "logit_bias": [t for t, _ in self._wish.logit_bias]}
        for field, tokens in named.items():
            for token in tokens:
                if token >= size:
                    raise InvalidRequest(
                        f"{field}: token id {token} is outside the vocabulary: ids go from 0 to {size - 1}", field
                    )

    def _id(self, place: int, n_prompts: int) -> str:
        return self._name if n_prompts * self._wish.n_drawn == 1 else f"{self._name}/{place}"
