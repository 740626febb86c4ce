"""What the wire says of the service itself: answers of /v1/models and /health. Shapes only."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class Model(BaseModel):
    """The model that is served."""

    id: str = Field(description="Its name: that of the weights directory.")
    object: Literal["model"] = Field(description="What this is.")
    created: int = Field(description="When the service started, in seconds since 1970.")
    owned_by: str = Field(description="Who serves it.")
    max_model_len: int = Field(description="Tokens that it reads, prompt and answer together.")
    n_params: int = Field(description="Parameters.")
    n_vocab: int = Field(description="Every token id is below this.")
    has_encoder: bool = Field(description="Whether it reads a `source`.")
    dtype: str = Field(description="Number format of weights and cache.")
    device: str = Field(description="Where it runs.")
    numerics: str = Field(description="What computes (torch or native kernels), and in which number format.")
    weights_version: str = Field(description="SHA-256 of the weights.")
    sampling_defaults: dict[str, float] = Field(description="What POST /complete takes where a request says nothing.")


class ModelList(BaseModel):
    """Answer of GET /v1/models."""

    object: Literal["list"] = Field(description="What this is.")
    data: list[Model] = Field(description="One model.")


class Health(BaseModel):
    """Answer of GET /health."""

    status: str = Field(description="live, ready or not ready.")
    phase: str | None = Field(None, description="What the service is doing.")
    reason: str | None = Field(None, description="Why it is not ready, where it fails every request.")
