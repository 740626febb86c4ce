"""Every knob of the service, once: flags, environment variables and the README's table come from here."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Frozen. Each field is a flag (--kv-blocks) and a variable (INKSTREAM_KV_BLOCKS)."""

    model_config = SettingsConfigDict(env_prefix="INKSTREAM_", frozen=True, extra="forbid")

    weights: Path = Field(Path("weights"), description="Weights directory (Hugging Face layout).")
    host: str = Field("127.0.0.1", description="Address to listen on; others than loopback need --insecure-no-auth.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    insecure_no_auth: bool = Field(False, description="Serve on any address although no key protects the service.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Number format of weights and cache; auto is bfloat16 where the device computes in it."
    )
    kernels: Literal["auto", "native", "torch"] = Field(
        "auto", description="What computes on a CPU; auto is native once the kernels are built, and torch until then."
    )
    quantize: Literal["none", "int8"] = Field(
        "none", description="int8 keeps weights as whole numbers of 8 bits: half the memory, sooner at few streams."
    )
    cache_dir: Path | None = Field(
        None, description="Where native kernels are kept; None is ~/.cache/inkstream (or in XDG_CACHE_HOME)."
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="CPU threads of the engine; 0 takes the cores it may use (affinity, cgroup limit).",
    )
    kv_blocks: int = Field(
        0, ge=0, le=2**31 - 1, description="Blocks of the KV cache; 0 takes what max_running can fill."
    )
    max_context: int = Field(
        0, ge=0, le=2**31 - 1, description="Longest sequence in tokens; 0 takes the model's own context."
    )
    max_running: int = Field(32, ge=1, le=1024, description="Requests computed together.")
    tokens_per_step: int = Field(256, ge=1, le=65536, description="Tokens computed in one step: prompts go in pieces.")
    prompt_tokens_beside: int = Field(
        0,
        ge=0,
        le=65536,
        description="Prompt tokens in a step that streams wait for, or 4 for each if that is more; "
        "0: 32 on a CPU, else as many as fit.",
    )
    max_waiting: int = Field(1024, ge=1, le=1_000_000, description="Requests that may wait; more are refused with 503.")
    max_waiting_tokens: int = Field(
        1_000_000, ge=1, description="Prompt tokens that may wait; more are refused with 503."
    )
    max_body_bytes: int = Field(1 << 20, ge=1024, le=1 << 30, description="Largest request body; larger ones get 413.")
    request_timeout: float = Field(
        600.0, gt=0, le=86400, description="Seconds an answer may take in all; deadline_ms can ask for less."
    )
    queue_timeout: float = Field(
        120.0, gt=0, le=86400, description="Seconds a request may wait for its turn before it gets 503."
    )
    resume_seconds: float = Field(
        60.0, ge=0, le=3600, description="Seconds a broken stream can be resumed; 0 keeps none."
    )
    resume_bytes: int = Field(
        1 << 18, ge=0, le=1 << 30, description="Bytes of events kept of each stream, for clients that lost some."
    )
    drain_timeout: float = Field(30.0, ge=0, le=3600, description="Seconds that open streams get after SIGTERM.")
    engine_silence: float = Field(
        30.0, ge=1, le=3600, description="Seconds without a sign of life, or of progress, until the engine restarts."
    )
    guide_seconds: float = Field(
        2.0,
        gt=0,
        le=60,
        description="Seconds that a regex, schema or grammar may take to prepare; longer ones get 400.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="How much is logged.")

    @field_validator("cache_dir", mode="before")
    @classmethod
    def _nothing_is_none(cls, value: object) -> object:
        return None if value == "" else value  # a variable that is set to nothing does not mean the working directory

    @model_validator(mode="after")
    def _budget_covers_decodes(self) -> Settings:
        if self.tokens_per_step < self.max_running:
            raise ValueError(f"tokens_per_step ({self.tokens_per_step}) is below max_running ({self.max_running})")
        return self

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
