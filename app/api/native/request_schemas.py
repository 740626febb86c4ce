"""What POST /complete may be asked for beyond what both doors know."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, model_validator

from app.api.completion_fields import CompletionFields, Ids, Prompts
from app.generation.request import GenerationRequest

_DEFAULT_MAX_TOKENS = 128


class CompleteRequest(CompletionFields):
    """Body of POST /complete. An unknown field is an error."""

    model_config = ConfigDict(extra="forbid")

    prompt: Prompts = Field(
        description="Text, token ids, or a list of either. Empty: start from nothing.", examples=["Once upon a time"]
    )
    source: str | Ids | None = Field(
        None, description="What the encoder reads, for models that have one; `prompt` may then be left out."
    )
    include_stop: bool | None = Field(None, description="Keep the stop at the end of the text.")

    @model_validator(mode="before")
    @classmethod
    def _answer_from_the_start(cls, body: Any) -> Any:
        if isinstance(body, dict) and "prompt" not in body and body.get("source") is not None:
            return {**body, "prompt": ""}
        return body

    @property
    def wish(self) -> GenerationRequest:
        """What was asked for."""
        return self.to_wish(
            self.prompt,
            max_tokens=_DEFAULT_MAX_TOKENS,
            source=self.source,
            include_stop=bool(self.include_stop),
            is_streamed=self.stream is not False,
        )
