"""What POST /v1/completions may be asked for: OpenAI's fields, and those of both doors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.api.fields import GUIDES, CompletionFields, Prompts
from app.wish import Wish

_DEFAULT_MAX_TOKENS = 16


class StreamOptions(BaseModel):
    """What a stream tells beside its text."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = Field(None, description="A last chunk with the usage and no choices.")
    continuous_usage_stats: bool | None = Field(None, description="The usage so far in every chunk.")


class CompletionsRequest(CompletionFields):
    """Body of POST /v1/completions. An unknown field is accepted and named in `warnings`."""

    model_config = ConfigDict(extra="allow")

    prompt: Prompts | None = Field(
        None, description="Text, token ids, or a list of either. Absent: start from nothing.", examples=["Once upon a"]
    )
    model: str | None = Field(None, description="The id that GET /v1/models tells; may be left out.")
    best_of: int | None = Field(
        None, ge=1, le=16, description="Draw so many, answer the n with the best mean log-probability; not in streams."
    )
    include_stop_str_in_output: bool | None = Field(None, description="Keep the stop at the end of the text.")
    stream_options: StreamOptions | None = Field(None, description="For streams.")
    response_format: dict[str, Any] | None = Field(
        None, description='{"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": {...}}.'
    )

    @model_validator(mode="after")
    def _fits_together(self) -> CompletionsRequest:
        n, best_of = self.n or 1, self.best_of
        if best_of is not None and best_of < n:
            raise ValueError(f"best_of ({best_of}) must be at least n ({n})")
        if best_of is not None and best_of > n and self.stream:
            raise ValueError("best_of above n cannot be streamed: send stream false")
        if self.response_format is not None and any(getattr(self, name) is not None for name in GUIDES):
            raise ValueError(f"response_format cannot be combined with {', '.join(GUIDES)}: send one of them")
        return self

    @property
    def guide(self) -> tuple[str, Any] | None:
        """What the text must follow: the name of the field, and its value."""
        return super().guide if self.response_format is None else ("response_format", self.response_format)

    @property
    def wish(self) -> Wish:
        """What was asked for; what was not is neutral here, whatever the weights' own files say."""
        return self.to_wish(
            "" if self.prompt is None else self.prompt,
            max_tokens=_DEFAULT_MAX_TOKENS,
            best_of=self.best_of,
            include_stop=bool(self.include_stop_str_in_output),
            use_model_defaults=False,
        )

    @property
    def warnings(self) -> list[str]:
        """What was sent and has no effect."""
        return [f"unknown field {name[:60]!r} has no effect" for name in list(self.model_extra or {})[:20]]
