"""A choice that goes on from what its client has of it, after the stream of another service or process broke.

The text is computed again, and the start that the client has is compared instead of sent:

    the client has    "Once upo"
    computed here     "Once" " upon" " a time"
    sent                        "n" " a time"

Ids that the client has save computing them: they are fed to the choice, and the engine continues from them, as after a
crash. They need not reach as far as the text does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from app.common.errors import InvalidRequest, ResumeRefused
from app.common.types import FinishReason, Request, SampledEvent
from app.generation.detokenizer import OutputChoice, PromptEcho, TextRules
from app.generation.prompt_encoder import EncodedPrompt
from app.generation.request import Delta, GenerationRequest, ReceivedChoice
from model.tokenizer.tokenizer import Tokenizer


class ResumedChoice(OutputChoice):
    """Emits what its client does not have. Raises ResumeRefused if the client has another text."""

    __slots__ = ("_held_ids", "_known_ids", "_n_known_details", "_position", "_received")

    def __init__(
        self,
        received: ReceivedChoice,
        index: int,
        request: Request,
        tokenizer: Tokenizer,
        rules: TextRules,
        echo: PromptEcho | None,
    ) -> None:
        super().__init__(index, request, tokenizer, rules, echo)
        self._received = received
        self._position = 0
        """Characters computed here, up to the length of the received text."""
        self._n_known_details = received.n_logprobs or 0
        """Log-probabilities that the client has and that will be computed here, too."""
        self._known_ids = received.token_ids if rules.returns_ids else ()
        """As `_n_known_details`, for ids."""
        self._held_ids: tuple[int, ...] = ()
        """Ids that the client does not have, for the next piece of text."""

    def feed(self) -> None:
        """Feeds the tokens from which the engine continues; may take milliseconds."""
        request, deltas = self._request, list[Delta]()
        if not request.generated:
            return
        if echo := self.echo:
            self.echo = None
            deltas.append(Delta(self.index, echo.text))
            self._n_known_details -= echo.n_scored
        for position, token in enumerate(request.generated):
            if self.ended:
                raise self._diverged("the text ends before the last of token_ids")
            deltas += super().add(SampledEvent(request.id, position, token, finish=_finish(request, position, token)))
        if self._received.n_logprobs is not None:
            self._n_known_details -= len(request.generated)
        self._known_ids = self._known_ids[len(request.generated) :]
        if self._unsent_ids:
            self._unsent_ids.clear()
        # One delta: completions hold a bounded number of tokens for a client that does not read.
        fed = Delta(self.index, "".join(delta.text for delta in deltas))
        self.first = self._without_received([fed] if fed.text else [])

    def add(self, event: SampledEvent) -> Sequence[Delta]:
        """See OutputChoice.add()."""
        return self._without_received(super().add(event))

    def finish(self, finish_reason: str) -> Sequence[Delta]:
        """Finishes the choice for a reason outside the text, which may come before the received text is repeated.

        What a cut text held back cannot be compared with what the client has, so a difference there is none.
        """
        try:
            return self._without_received(super().finish(finish_reason), is_cut=True)
        except ResumeRefused:
            return ()

    def _without_received(self, deltas: Sequence[Delta], *, is_cut: bool = False) -> Sequence[Delta]:
        """The deltas without what the client has."""
        received = self._received
        is_current = self._position == len(received.text) and not (self._n_known_details or self._known_ids)
        if is_current and not (self._held_ids or received.is_finished):
            return deltas
        new = [delta for delta in map(self._new_part, deltas) if delta]
        if self.ended and not is_cut and self._position < len(received.text):
            raise self._diverged(f"the text has {self._position} characters, and {len(received.text)} arrived")
        if received.is_finished:
            if new:
                raise self._diverged("the text continues after the end that arrived")
        elif self.ended and self._held_ids:
            last = new.pop() if new else Delta(self.index, "", (), self._base + self._sent)
            new.append(replace(last, ids=last.ids + self._held_ids))
            self._held_ids = ()
        return new

    def _new_part(self, delta: Delta) -> Delta | None:
        """The part of a delta that the client does not have; None if it has all text and tokens."""
        text, begin = delta.text, self._position
        known = self._received.text[begin : begin + len(text)]
        if not text.startswith(known):
            same = next(at for at, (a, b) in enumerate(zip(text, known, strict=False)) if a != b)
            raise self._diverged(f"the text is another one from character {begin + same} on")
        self._position += len(known)
        n_known_ids = min(len(self._known_ids), len(delta.ids))
        if delta.ids[:n_known_ids] != self._known_ids[:n_known_ids]:
            raise self._diverged("the tokens are other ones than token_ids")
        self._known_ids = self._known_ids[n_known_ids:]
        n_known_details = min(self._n_known_details, len(delta.tokens))
        self._n_known_details -= n_known_details
        ids, tokens = self._held_ids + delta.ids[n_known_ids:], delta.tokens[n_known_details:]
        has_news = len(known) < len(text) or tokens
        self._held_ids = () if has_news else ids
        return Delta(self.index, text[len(known) :], tokens, delta.start + len(known), ids) if has_news else None

    def _diverged(self, how: str) -> ResumeRefused:
        name = f"resume.choices[{self.index}]"
        return ResumeRefused(f"{name}: {how}: send the request again without resume", name, "resume_diverged")


def _finish(request: Request, position: int, token: int) -> FinishReason | None:
    """How the engine ends a sequence with this token. A grammar may accept or refuse the text at its last token."""
    if token in request.stop_ids:
        return FinishReason.STOP
    is_last = position + 1 == request.max_tokens and not request.grammar
    return FinishReason.LENGTH if is_last else None


def with_generated(
    requests: Sequence[Request], request: GenerationRequest, encoded: Sequence[EncodedPrompt], vocab_size: int
) -> list[Request]:
    """The engine requests, which continue from the ids that the client has. Raises InvalidRequest."""
    assert request.resumption
    received = request.resumption.choices
    if len(received) != len(requests):
        raise InvalidRequest(
            f"resume.choices must have one entry for each choice, {len(requests)}, and has {len(received)}",
            "resume.choices",
        )
    resumed: list[Request] = []
    for first in range(0, len(requests), request.n_sampled):
        group = range(first, first + request.n_sampled)
        n_echoed = len(encoded[first // request.n_sampled].ids) if request.echo else 0
        resumed += _group(
            [requests[index] for index in group], [received[index] for index in group], request, n_echoed, vocab_size
        )
    return resumed


def _group(
    requests: Sequence[Request],
    received: Sequence[ReceivedChoice],
    request: GenerationRequest,
    n_echoed: int,
    vocab_size: int,
) -> Iterable[Request]:
    """with_generated() for the choices of one prompt, whose leader scores it if any of them still needs that."""
    generated = [
        _checked(one, choice, is_scored=request.logprobs is not None, n_echoed=n_echoed, vocab_size=vocab_size)
        for one, choice in zip(requests, received, strict=True)
    ]
    leader, needs_scores = requests[0], requests[0].prompt_logprobs is not None and not all(generated)
    scored = len(leader.prompt) - 1 if leader.prompt_logprobs is not None and not needs_scores else 0
    yield replace(leader, generated=() if needs_scores else generated[0], scored=scored)
    for one, ids in zip(requests[1:], generated[1:], strict=True):
        yield replace(one, generated=ids)


def _checked(
    request: Request, received: ReceivedChoice, *, is_scored: bool, n_echoed: int, vocab_size: int
) -> tuple[int, ...]:
    """The ids to continue from: with log-probabilities, those whose log-probabilities arrived."""
    ids, name = received.token_ids, received.name
    if len(ids) > request.max_tokens:
        message = f"{name}.token_ids has {len(ids)} ids, and the request allows {request.max_tokens} tokens"
        raise InvalidRequest(message, f"{name}.token_ids")
    if (largest := max(ids, default=0)) >= vocab_size:
        message = f"{name}.token_ids: token id {largest} is outside the vocabulary: ids go from 0 to {vocab_size - 1}"
        raise InvalidRequest(message, f"{name}.token_ids")
    if is_scored != (received.n_logprobs is not None):
        need = "must say how many tokens came with log-probabilities" if is_scored else "is for requests with logprobs"
        raise InvalidRequest(f"{name}.logprobs {need}", f"{name}.logprobs")
    return ids if received.n_logprobs is None else ids[: max(0, received.n_logprobs - n_echoed)]
