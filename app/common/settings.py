"""Settings of the service: the source of flags, environment variables and the README's table."""

from __future__ import annotations

import ipaddress
import math
import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Frozen. Each field is a flag (--kv-blocks) and a variable (INKSTREAM_KV_BLOCKS)."""

    model_config = SettingsConfigDict(env_prefix="INKSTREAM_", frozen=True, extra="forbid")

    weights: Path = Field(Path("weights"), description="Weights directory (Hugging Face layout).")
    watch: float = Field(
        0.0, ge=0, le=3600, description="Seconds between looks for new weights there; 0 loads them only on SIGHUP."
    )
    host: str = Field("127.0.0.1", description="Address to listen on; others than loopback need keys.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    keys_file: Path | None = Field(
        None, description="File with the keys of callers (inkstream keys add NAME); None lets everybody in."
    )
    insecure_no_auth: bool = Field(False, description="Serve on any address although no key protects the service.")
    allowed_hosts: str = Field(
        "",
        description="Names of this service, with commas; addresses, localhost and names without a dot need no mention.",
    )
    allow_origin: str = Field(
        "",
        description="Origins whose pages may use the service (CORS), with commas: https://a.example,https://b.example",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Number format of weights and cache; auto is bfloat16 where the device computes in it."
    )
    kernels: Literal["auto", "native", "torch"] = Field(
        "auto",
        description="What computes: auto takes native kernels on a CPU once they are built, Triton's on a GPU, "
        "and torch else.",
    )
    quantize: Literal["none", "int8", "fp8"] = Field(
        "none",
        description="int8 keeps weights as whole numbers of 8 bits: half the memory, sooner at few streams; fp8 also "
        "computes in 8 bits, on GPUs that can.",
    )
    deterministic: bool = Field(
        False,
        description="Steps of one shape on a GPU, and a proof at the start that an answer does not hang on what is "
        "computed beside it.",
    )
    cache_dir: Path | None = Field(
        None, description="Where compiled kernels are kept; None is ~/.cache/inkstream (or in XDG_CACHE_HOME)."
    )
    replicas: int = Field(
        1,
        ge=1,
        le=64,
        description="Engines behind this service: a GPU each, or an equal share of the CPU threads.",
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="CPU threads of all engines together; 0 takes the cores they may use (affinity, cgroup limit).",
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of a GPU's memory that an engine may take; the cache gets what is left.",
    )
    kv_blocks: int = Field(
        0,
        ge=0,
        le=2**31 - 1,
        description="Blocks of each engine's KV cache; 0 takes what max_running can fill, on a GPU all that is left.",
    )
    max_context: int = Field(
        0, ge=0, le=2**31 - 1, description="Longest sequence in tokens; 0 takes the model's own context."
    )
    max_running: int = Field(32, ge=1, le=1024, description="Requests that an engine computes together.")
    tokens_per_step: int = Field(
        0,
        ge=0,
        le=65536,
        description="Tokens computed in one step: prompts go in pieces; 0: 256, of prompts 64 where keys are told "
        "apart; on a GPU without deterministic 2048.",
    )
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
    max_header_bytes: int = Field(16384, ge=1024, le=1 << 20, description="Largest request headers, in all; else 431.")
    max_headers: int = Field(100, ge=8, le=10_000, description="Most headers of a request; more get 431.")
    max_url_bytes: int = Field(8192, ge=256, le=1 << 16, description="Longest URL; longer ones get 414.")
    max_connections: int = Field(
        4096,
        ge=1,
        le=1_000_000,
        description="Connections at once, as far as the limit of open files allows; more are refused with 503.",
    )
    max_connections_per_address: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="The same from one address; 0 is half of all. Behind a proxy, all that it may open.",
    )
    head_timeout: float = Field(
        10.0, gt=0, le=3600, description="Seconds for the headers of a request, from its first byte; then 408."
    )
    body_timeout: float = Field(30.0, gt=0, le=3600, description="Seconds for its body; then 408.")
    write_timeout: float = Field(
        30.0, gt=0, le=3600, description="Seconds that a client may not read while there is something to read."
    )
    keep_alive_timeout: float = Field(
        75.0, gt=0, le=3600, description="Seconds that a connection may idle between two requests."
    )
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
    log_format: Literal["auto", "text", "json"] = Field(
        "auto", description="How a line of the log is written; auto is text on a terminal and JSON elsewhere."
    )

    @field_validator("host")
    @classmethod
    def _is_not_empty(cls, value: str) -> str:
        if not value:  # the system would take it for every address there is
            raise ValueError("must not be empty: 127.0.0.1 is this machine alone, 0.0.0.0 every address")
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _are_names(cls, value: str) -> str:
        for name in _listed(value):
            if not re.fullmatch(r"[A-Za-z0-9_.-]{1,253}", name):
                raise ValueError(f"{name[:100]!r} is no name: write a.example,b.example, without scheme and port")
        return value

    @field_validator("allow_origin")
    @classmethod
    def _are_origins(cls, value: str) -> str:
        for origin in _listed(value):
            if not re.fullmatch(r"https?://[a-z0-9_.-]+(:[0-9]{1,5})?", origin):
                raise ValueError(
                    f"{origin[:100]!r} is no origin: write https://a.example, in small letters, with a port but no path"
                )
        return value

    @field_validator("weights", mode="before")
    @classmethod
    def _is_no_working_directory(cls, value: object) -> object:
        if value == "":  # a path would be made of it: the working directory's
            raise ValueError("must not be empty: it is a weights directory, . the one that you are in")
        return value

    @field_validator("cache_dir", "keys_file", mode="before")
    @classmethod
    def _nothing_is_none(cls, value: object) -> object:
        return None if value == "" else value  # a variable that is set to nothing does not mean the working directory

    @model_validator(mode="after")
    def _budget_covers_decodes(self) -> Settings:
        if 0 < self.tokens_per_step < self.max_running:
            raise ValueError(
                f"--tokens-per-step {self.tokens_per_step} is below --max-running {self.max_running}, and each running "
                "request takes a token of a step: raise the one or lower the other"
            )
        return self

    @property
    def host_names(self) -> frozenset[str]:
        """What the service may be called in a request, beside what needs no mention."""
        return frozenset(_listed(self.allowed_hosts)) | {self.host}

    @property
    def origins(self) -> tuple[str, ...]:
        """Whose pages may read answers."""
        return _listed(self.allow_origin)

    @property
    def longest_deadline_ms(self) -> int:
        """The most that a request may ask for as `deadline_ms`."""
        return max(1, math.floor(self.request_timeout * 1e3))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _listed(value: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in value.split(","))))
