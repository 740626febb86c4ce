"""Settings of the service: the source of flags, environment variables and the table in docs/settings.md."""

from __future__ import annotations

import ast
import inspect
import ipaddress
import math
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from model.cache_formats import KvCache
from model.weight_formats import Quantize

GROUPS: Mapping[str, str] = {
    "weights": "model",
    "host": "network",
    "max_running": "limits",
    "log_level": "logs",
    "kernels": "advanced",
}
"""First field of each group -> its title in the help and in docs/settings.md."""
CLIENT_KEY = "INKSTREAM_API_KEY"
"""Environment variable of a client's API key; not a setting of the service."""
CLIENT_URL = "INKSTREAM_URL"
"""Environment variable of the URL of the service that clients use; not a setting of the service."""
INCLUDED_WEIGHTS = Path(__file__).parents[2] / "weights"
"""The default model, which lies beside app in a checkout and in a wheel."""


def default_weights() -> Path:
    """The weights that are served where the user names none."""
    return INCLUDED_WEIGHTS if INCLUDED_WEIGHTS.is_dir() and not Path("weights").exists() else Path("weights")


class Settings(BaseSettings):
    """Frozen. Each field is a flag (--kv-blocks) and a variable (INKSTREAM_KV_BLOCKS); its docstring is the help."""

    model_config = SettingsConfigDict(env_prefix="INKSTREAM_", frozen=True, extra="forbid")

    weights: Path = Path("weights")
    """Weights directory (Hugging Face layout), GGUF file, or a model of the Hugging Face Hub: org/name[@revision], or
    org/name:Q4_K_M for a GGUF file there. Without this setting and without a folder weights here, the model that comes
    with inkstream."""
    watch: float = Field(0.0, ge=0, le=3600)
    """Seconds between checks for new weights in that directory; 0 reloads only on SIGHUP."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that runs the model; auto uses a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of steps and KV cache; auto is bfloat16 if the device multiplies it, else float32."""
    quantize: Quantize = "none"
    """int8 and int4 store weights as integers of 8 or 4 bits, with scales for groups of columns: 8.5 and 4.6 bits per
    weight instead of 16, faster with few streams; fp8 also computes in 8 bits, on GPUs that support it."""
    kv_cache: KvCache = "auto"
    """Format of the KV cache; auto is the number format of the model. int8 stores keys and values as 8-bit integers, on
    CPUs: half the memory of bfloat16, and faster where the cache exceeds the processor's."""
    speculate: Literal["auto", "lookup", "off"] = "auto"
    """Speculative decoding: lookup verifies drafts that it finds in earlier text, where that is faster. It changes no
    token. auto is lookup on a CPU, and off on a GPU."""
    max_context: int = Field(0, ge=0, le=2**31 - 1)
    """Longest sequence in tokens; 0 is the model's own context length, or the longest one whose cache fits."""
    host: str = "127.0.0.1"
    """Address to listen on; any but a loopback address requires API keys."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    open: bool = False
    """Open the page in the browser once the service is ready."""
    keys_file: Path | None = None
    """File with API keys (inkstream keys add NAME); None serves every request without a key."""
    insecure_no_auth: bool = False
    """Allow any address without API keys."""
    allowed_hosts: str = ""
    """Host names to accept, separated by commas; IP addresses, localhost and names without a dot are always
    accepted."""
    allow_origin: str = ""
    """Origins whose pages may use the service (CORS), separated by commas: https://a.example,https://b.example"""
    compare_origin: str = ""
    """Origins of other inkstream services whose models the page may compare with this one's, separated by commas; each
    must allow this service's origin with --allow-origin"""
    max_running: int = Field(32, ge=1, le=1024)
    """Most requests that an engine runs at once."""
    max_waiting: int = Field(1024, ge=1, le=1_000_000)
    """Longest queue in requests; more get 503."""
    max_waiting_tokens: int = Field(1_000_000, ge=1)
    """Longest queue in prompt tokens; more get 503."""
    max_body_bytes: int = Field(1 << 20, ge=1024, le=1 << 30)
    """Largest request body; larger ones get 413."""
    max_header_bytes: int = Field(16384, ge=1024, le=1 << 20)
    """Largest headers of a request in total; larger ones get 431."""
    max_headers: int = Field(100, ge=8, le=10_000)
    """Most header fields of a request; more get 431."""
    max_url_bytes: int = Field(8192, ge=256, le=1 << 16)
    """Longest URL; longer ones get 414."""
    max_connections: int = Field(4096, ge=1, le=1_000_000)
    """Most open connections, or fewer if the limit of open files requires; more get 503."""
    max_connections_per_address: int = Field(0, ge=0, le=1_000_000)
    """Most open connections from one address; 0 is half of --max-connections. A proxy is one address."""
    head_timeout: float = Field(10.0, gt=0, le=3600)
    """Seconds to receive the headers of a request, from its first byte; then 408."""
    body_timeout: float = Field(30.0, gt=0, le=3600)
    """Seconds to receive the body of a request; then 408."""
    write_timeout: float = Field(30.0, gt=0, le=3600)
    """Seconds that a client may stop reading before its connection is closed."""
    keep_alive_timeout: float = Field(75.0, gt=0, le=3600)
    """Seconds that a connection may be idle between two requests."""
    request_timeout: float = Field(600.0, gt=0, le=86400)
    """Seconds a response may take in total; a request can ask for less by deadline_ms."""
    queue_timeout: float = Field(120.0, gt=0, le=86400)
    """Seconds a request may wait in the queue before it gets 503."""
    resume_seconds: float = Field(60.0, ge=0, le=3600)
    """Seconds during which a client can resume a broken stream; 0 disables resuming."""
    resume_bytes: int = Field(1 << 18, ge=0, le=1 << 30)
    """Bytes of events kept for each stream, to send again when a client resumes it."""
    drain_timeout: float = Field(30.0, ge=0, le=3600)
    """Seconds that open streams may take to finish after SIGTERM."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    log_format: Literal["auto", "text", "json"] = "auto"
    """Format of log lines; auto is a summary and short lines on a terminal, and JSON elsewhere."""
    traces: bool = False
    """Export OpenTelemetry traces of requests (needs the extra traces); OTEL_* variables say where to and how many."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """Compute backend: auto uses native kernels on a CPU once they are built, Triton kernels on a GPU, and torch
    otherwise."""
    deterministic: bool = False
    """Compute steps of one shape on a GPU, and check at startup that a request's result does not depend on the other
    requests in its batch."""
    cache_dir: Path | None = None
    """Directory of compiled kernels and of stored weights; None is inkstream in XDG_CACHE_HOME, by default ~/.cache."""
    packed_cache_bytes: int = Field(8 << 30, ge=0)
    """Most bytes of weights kept there, with which a service starts faster: packed for native kernels, and copies of
    the files; 0 keeps no packed weights, and copies only of those served last."""
    replicas: int = Field(1, ge=0, le=64)
    """Engine processes: each has a GPU of its own, or an equal share of the CPU threads; auto (0) is one for each NUMA
    node."""
    threads: int = Field(0, ge=0, le=1024)
    """CPU threads of all engines together; 0 is one for each physical core that affinity and cgroup limits allow."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory that an engine may use; the KV cache gets what the model leaves."""
    kv_blocks: int = Field(0, ge=0, le=2**31 - 1)
    """Blocks in each engine's KV cache, for layers without a window if a model has both; 0 is as many as --max-running
    requests can fill, on a GPU all memory that is left."""
    tokens_per_step: int = Field(0, ge=0, le=65536)
    """Most tokens in one step; longer prompts are computed in chunks. 0 is 2048 on a GPU without --deterministic, else
    256; on a CPU with API keys 0 also allows at most 64 prompt tokens in a step."""
    prompt_tokens_beside: int = Field(0, ge=0, le=65536)
    """Most prompt tokens in a step that also decodes, or 4 for each decoding request if that is more; 0 is 32 on a CPU,
    and as many as fit on a GPU."""
    engine_silence: float = Field(30.0, ge=1, le=3600)
    """Seconds without a report or progress from an engine until it is restarted."""
    guide_seconds: float = Field(2.0, gt=0, le=60)
    """Seconds that a regex, schema or grammar may take to compile; longer ones get 400."""

    @field_validator("host")
    @classmethod
    def _is_not_empty(cls, value: str) -> str:
        if not value:  # the system would listen on every address
            raise ValueError("must not be empty: 127.0.0.1 is this machine alone, 0.0.0.0 every address")
        if "/" in value:
            raise ValueError(f"{value[:100]!r} is not an address: write 127.0.0.1 or a name, without http:// and port")
        return value

    @field_validator("allowed_hosts", "allow_origin", "compare_origin")
    @classmethod
    def _is_list_of_names(cls, value: str, info: ValidationInfo) -> str:
        is_host = info.field_name == "allowed_hosts"
        pattern = r"[A-Za-z0-9_.-]{1,253}" if is_host else r"https?://[a-z0-9_.-]+(:[0-9]{1,5})?"
        right = (
            "a.example,b.example, without scheme and port" if is_host else "https://a.example, in lower case, no path"
        )
        for name in _split(value):
            if not re.fullmatch(pattern, name):
                raise ValueError(f"{name[:100]!r} is not {'a host name' if is_host else 'an origin'}: write {right}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _find_included_weights(cls, given: dict[str, Any]) -> dict[str, Any]:
        return given if "weights" in given else {**given, "weights": default_weights()}

    @field_validator("weights", mode="before")
    @classmethod
    def _is_not_working_directory(cls, value: object) -> object:
        if value == "":  # Path("") is the working directory
            raise ValueError("must not be empty: name a weights directory, or . for the working directory")
        return value

    @field_validator("replicas", mode="before")
    @classmethod
    def _auto_is_zero(cls, value: object) -> object:
        return 0 if value == "auto" else value

    @field_validator("cache_dir", "keys_file", mode="before")
    @classmethod
    def _empty_is_none(cls, value: object) -> object:
        return None if value == "" else value  # an empty variable is unset, not the working directory

    @model_validator(mode="after")
    def _budget_covers_decodes(self) -> Settings:
        if 0 < self.tokens_per_step < self.max_running:
            raise ValueError(
                f"--tokens-per-step {self.tokens_per_step} is below --max-running {self.max_running}, and each running "
                "request takes a token of a step: raise --tokens-per-step or lower --max-running"
            )
        return self

    @property
    def host_names(self) -> frozenset[str]:
        """Host names that requests may use, in addition to those that are always accepted."""
        return frozenset(_split(self.allowed_hosts)) | {self.host}

    @property
    def origins(self) -> tuple[str, ...]:
        """Origins whose pages may read responses."""
        return _split(self.allow_origin)

    @property
    def compared_origins(self) -> tuple[str, ...]:
        """Origins of other services to which the page may send completions."""
        return _split(self.compare_origin)

    @property
    def max_deadline_ms(self) -> int:
        """Largest `deadline_ms` that a request may set."""
        return max(1, math.floor(self.request_timeout * 1e3))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def grouped_fields() -> Mapping[str, Mapping[str, FieldInfo]]:
    """The fields of Settings by the title of their group, all in order."""
    groups: dict[str, dict[str, FieldInfo]] = {}
    title = ""
    for name, field in Settings.model_fields.items():
        title = GROUPS.get(name, title)
        groups.setdefault(title, {})[name] = field
    return groups


def field_docstrings() -> Mapping[str, str]:
    """The docstrings of the fields of Settings, by name.

    Read here and not by pydantic, which would parse this file at every start, 24 of the 28 ms of its import.
    """
    module = ast.parse(Path(__file__).read_bytes())
    (body,) = [node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == Settings.__name__]
    return {
        ast.unparse(field.target): inspect.cleandoc(ast.literal_eval(docstring.value))
        for field, docstring in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(docstring, ast.Expr)
    }


def _split(value: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in value.split(","))))
