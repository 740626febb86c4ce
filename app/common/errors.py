"""Errors of a request, as one tree.

EngineError
  InvalidRequest            the client must change the request
    ContextLengthExceeded   the prompt is longer than the model's context
    ResumeRefused           what the client has is not the start of what is computed here
  Unavailable               the client may retry after `retry_after` seconds
    QueueFull               too many requests wait already
    NotReady                the engine is loading, or restarting after a crash
      Starting              the first model is loading
    QueueTimeout            the queue did not move fast enough for this request
    RateLimitExceeded       the tenant's rate limit does not allow more now
  DeadlineExceeded          the request's deadline passed before its first token
  EngineFailed              server error: the engine crashed or could not continue this request
  (stream.Cancelled         the request was cancelled; not reported as an error)
"""

from __future__ import annotations


class EngineError(Exception):
    """Root of the tree; the message is written for the user."""


class InvalidRequest(EngineError):
    """The request is invalid; the client must change it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or the source, does not fit into the context."""

    def __init__(
        self, prompt_tokens: int, max_model_len: int, field: str, *, is_least: bool = False, remedy: str = ""
    ) -> None:
        """`is_least`: `prompt_tokens` is a lower bound. `remedy`: an alternative to shortening the field."""
        count = f"at least {prompt_tokens}" if is_least else str(prompt_tokens)
        if field == "prompt":
            remedy = remedy or "keep only its end with truncate_prompt_tokens"
        message = f"the {field} has {count} tokens, the model reads at most {max_model_len}: shorten the {field}"
        message += f", or {remedy}" if remedy else ""
        super().__init__(message, field)
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len
        self.is_least = is_least


class ResumeRefused(InvalidRequest):
    """What the client has of a response is not the start of what is computed here."""

    def __init__(self, message: str, param: str, code: str) -> None:
        """`code`: receipt_mismatch, or resume_diverged if the text itself is another one."""
        super().__init__(message, param)
        self.code = code


class Unavailable(EngineError):
    """The service cannot take the request now; the client may retry after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(Unavailable):
    """The queue has reached a limit."""


class NotReady(Unavailable):
    """No engine is ready."""


class Starting(NotReady):
    """The service has just started and has no model yet."""


class QueueTimeout(Unavailable):
    """The request waited longer than --queue-timeout in the queue."""


class RateLimitExceeded(Unavailable):
    """The tenant's rate limit does not allow the request now; other tenants are not affected."""


class DeadlineExceeded(EngineError):
    """The request's deadline passed before its first token."""


class EngineFailed(EngineError):
    """The engine failed while it worked on a request."""
