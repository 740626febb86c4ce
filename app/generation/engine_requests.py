"""Engine requests of a generation request, one per continuation, and the output choices that consume their events."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from app.common.errors import InvalidRequest
from app.common.ipc import Ready
from app.common.types import Request, SamplingParams
from app.generation.detokenizer import OutputChoice, PromptEcho, TextRules
from app.generation.prompt_encoder import EncodedPrompt
from app.generation.receipt import check_receipt
from app.generation.request import GenerationRequest
from app.generation.resumed_choice import ResumedChoice, with_generated
from app.generation.stop_matcher import MarkedStops
from model.tokenizer.infill import infill_tokens
from model.tokenizer.tokenizer import Tokenizer


def _end_ids(request: GenerationRequest, ready: Ready, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end the text: the model's; in a chat, all that its files name; in an infill, the family's too."""
    ends = [*tokenizer.end_ids(ready.eos_ids)]
    if request.is_chat:
        ends += tokenizer.chat_end_ids(ready.named_eos_ids)
    if request.suffix is not None and (tokens := infill_tokens(tokenizer)):
        ends += tokens.ends
    return tuple(dict.fromkeys(ends))


_MAX_LOGPROBS = 200_000


class BuiltRequests:
    """All sequences of one generation request: choice i of prompt p has the index p * n + i."""

    def __init__(
        self, name: str, request: GenerationRequest, ready: Ready, tokenizer: Tokenizer, cache_namespace: str
    ) -> None:
        self._name = name
        self._request = request
        self._ready = ready
        self._tokenizer = tokenizer
        self._salt = cache_namespace
        self._eos_ids = () if request.ignore_eos else _end_ids(request, ready, tokenizer)

    def _check_size(self, encoded: Sequence[EncodedPrompt]) -> None:
        """Raises InvalidRequest if the response would hold too many log-probabilities."""
        request, context = self._request, self._ready.context
        if request.logprobs is None:
            return
        per_token = 1 + request.logprobs
        max_sampled = 0 if request.is_streamed else request.max_tokens
        lengths = [
            (len(prompt.ids) if request.echo else 0) + min(max_sampled, context - len(prompt.ids)) for prompt in encoded
        ]
        size = sum(lengths) * request.n_sampled * per_token
        limit = max(_MAX_LOGPROBS, context * per_token)
        if size > limit:
            raise InvalidRequest(
                f"logprobs: the response could have {size} log-probabilities, the limit is {limit}: "
                "ask for fewer prompts, a smaller n, fewer tokens, or smaller logprobs",
                "logprobs",
            )

    def requests(self, encoded: Sequence[EncodedPrompt], source: tuple[int, ...], grammar: str = "") -> list[Request]:
        """The engine requests. Raises InvalidRequest."""
        request = self._request
        self._check_vocabulary()
        self._check_size(encoded)
        if request.min_tokens > request.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({request.min_tokens}) must not be above max_tokens ({request.max_tokens})", "min_tokens"
            )
        params = self._params()
        stop_ids = tuple(dict.fromkeys((*self._eos_ids, *request.stop_token_ids)))
        requests = []
        n_choices: Counter[tuple[int, ...]] = Counter()
        """By prompt: the continuations so far, if equal prompts vary."""
        for index, prompt in enumerate(encoded):
            first = n_choices[prompt.ids]
            if request.varies_equal_prompts:
                n_choices[prompt.ids] += request.n_sampled
            leader = Request(
                id=self._id(index * request.n_sampled, len(encoded)),
                prompt=prompt.ids,
                max_tokens=min(request.max_tokens, self._most_tokens(len(prompt.ids))),
                params=replace(params, choice=first),
                source=source,
                stop_ids=stop_ids,
                prompt_logprobs=request.logprobs if request.echo else None,
                grammar=grammar,
                cache_namespace=self._salt,
                speculate=request.speculates,
            )
            requests.append(leader)
            for choice in range(1, request.n_sampled):
                requests.append(
                    replace(
                        leader,
                        id=self._id(index * request.n_sampled + choice, len(encoded)),
                        params=replace(params, choice=first + choice),
                        prompt_logprobs=None,
                        leader=leader.id,
                    )
                )
        if request.resumption:
            check_receipt(request.resumption.receipt, request, params, self._ready)
            return with_generated(requests, request, encoded, self._ready.vocab_size)
        return requests

    def _most_tokens(self, prompt_tokens: int) -> int:
        """Tokens that fit the context after a prompt.

        A scored prompt that fills the context gets one, too: nothing follows it, so it needs no position. lm-eval
        sends such prompts with `max_tokens` 1, and takes the last entry of the log-probabilities for that token.
        """
        request, left = self._request, self._ready.context - prompt_tokens
        is_scored = request.echo and request.logprobs is not None and request.grammar is None
        return max(left, 1) if is_scored else left

    def choices(self, requests: Sequence[Request], encoded: Sequence[EncodedPrompt]) -> list[OutputChoice]:
        """The output choices that consume the events of `requests`."""
        request = self._request
        rules = TextRules(
            stops=request.stops,
            marked_stops=MarkedStops.of(request.stops, self._tokenizer.special_ids),
            include_stop=request.include_stop,
            min_tokens=request.min_tokens,
            eos_ids=frozenset(self._eos_ids),
            returns_ids=request.returns_token_ids and request.is_streamed,
        )
        echoes = [self._echo(prompt) if request.echo else None for prompt in encoded]
        if request.resumption:
            return [
                ResumedChoice(
                    received, index, engine_request, self._tokenizer, rules, echoes[index // request.n_sampled]
                )
                for index, (engine_request, received) in enumerate(
                    zip(requests, request.resumption.choices, strict=True)
                )
            ]
        return [
            OutputChoice(index, engine_request, self._tokenizer, rules, echoes[index // request.n_sampled])
            for index, engine_request in enumerate(requests)
        ]

    def _echo(self, prompt: EncodedPrompt) -> PromptEcho:
        is_scored = self._request.logprobs is not None
        return PromptEcho(prompt.text, prompt.ids, self._tokenizer, is_scored=is_scored, starts=prompt.starts)

    def _params(self) -> SamplingParams:
        """The request's values, or the model's defaults, or no filter; a random seed if none was given."""
        request = self._request
        requested = {name: value for name, value in request.sampling.items() if value is not None}
        defaults = self._ready.sampling_defaults if request.use_model_defaults else {}
        values: dict[str, Any] = {"top_k": 0, **defaults, **requested}
        # best_of ranks by the log-probabilities of the sampled tokens.
        logprobs = 0 if request.logprobs is None and request.is_ranked else request.logprobs
        return SamplingParams(
            **{**values, "top_k": max(0, int(values["top_k"]))},
            logit_bias=request.logit_bias,
            min_tokens=request.min_tokens,
            seed=secrets.randbits(53) if request.seed is None else request.seed,  # 53 bits survive every JSON parser
            logprobs=logprobs,
        )

    def _check_vocabulary(self) -> None:
        size = self._ready.vocab_size
        request = self._request
        named = {"stop_token_ids": request.stop_token_ids, "logit_bias": [token for token, _ in request.logit_bias]}
        for name, tokens in named.items():
            for token in tokens:
                if token >= size:
                    raise InvalidRequest(
                        f"{name}: token id {token} is outside the vocabulary: ids go from 0 to {size - 1}", name
                    )

    def _id(self, index: int, n_prompts: int) -> str:
        return self._name if n_prompts * self._request.n_sampled == 1 else f"{self._name}/{index}"
