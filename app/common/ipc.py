"""Messages between API process and engine process: length-prefixed msgpack, and the engine's reader.

Down (to the engine): WorkerConfig once, then Submit and Cancel. Up (from the engine): Phase while loading, Ready or
Fatal, then StepReports. Nothing is ever unpickled; a frame that does not fit its struct raises msgspec.ValidationError.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from app.common.frames import FrameDecoder, encode_body
from app.common.model_version import Version
from app.common.types import Request, StepReport
from model.cache_formats import KvCache
from model.weight_formats import Quantize
from model.weights_version import Directory, WeightsVersion, readable

Speculate = Literal["auto", "lookup", "off"]


class WorkerConfig(Struct, frozen=True, kw_only=True, tag="config"):
    """Configuration of the engine process, sent once at its start."""

    weights: str
    version: WeightsVersion | None = None
    """What the API process keeps of `weights`; None reads the directory as it is."""
    device: str = "auto"
    dtype: str = "auto"
    kernels: Literal["auto", "native", "torch"] = "auto"
    has_torch: bool = True
    """Whether torch was installed when the service started; engines that come back decide alike."""
    library: str | None = None
    """Path of the native kernels that the service found at startup."""
    cache_dir: str | None = None
    packed_cache_bytes: int = 0
    """Most bytes of the weights store in the cache directory; 0 neither reads nor keeps packed weights."""
    quantize: Quantize = "none"
    kv_cache: KvCache = "auto"
    speculate: Speculate = "auto"
    """Where drafts come from; "auto" is "lookup" on a CPU and "off" on a GPU."""
    deterministic: bool = False
    """Steps of constant shapes, and a check at startup that results are batch invariant."""
    threads: int = 0
    """Compute threads; 0: the default of the CPUs that the process may use."""
    cpus: tuple[int, ...] = ()
    """CPUs of an engine on a CPU: EngineShare in app/common/cpu_topology.py."""
    replica: int = 0
    """Index of this engine in the pool, from 0; on GPUs also the index of its GPU."""
    replicas: int = 1
    concurrent_loaders: int = 0
    """Other engines that allocate their KV caches on the same machine at the same time."""
    reserved_bytes: int = 0
    """Of memory that seems free, but that running engines have reserved for their KV caches."""
    kv_blocks: int = 0
    gpu_memory_utilization: float = 0.9
    max_context: int = 0
    tokens_per_step: int = 0
    """0: the default of the device."""
    prompt_tokens_beside: int = 0
    max_running: int = 32
    heartbeat_seconds: float = 1.0
    silence_seconds: float = 30.0
    """Seconds without a report after which the engine is killed."""
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"

    @property
    def directory(self) -> Directory:
        """The weights, as this process can read them."""
        return readable(self.version) if self.version else Path(self.weights)

    @property
    def name(self) -> str:
        """Name of the engine in the log."""
        return f"engine {self.replica}" if self.replicas > 1 else "engine"


class Submit(Struct, frozen=True, tag="submit"):
    """A new request."""

    request: Request


class Cancel(Struct, frozen=True, tag="cancel"):
    """Cancels a request."""

    request_id: str


class Phase(Struct, frozen=True, array_like=True, tag="phase"):
    """Human-readable phase of an engine that is not ready yet; startup_timer.py lists those that are timed."""

    name: str


class Ready(Struct, frozen=True, kw_only=True, array_like=True, tag="ready"):
    """The engine has loaded: facts about the model and the KV cache."""

    context: int
    vocab_size: int
    n_params: int
    dtype: str
    device: str
    model_version: Version
    eos_ids: tuple[int, ...]
    start_id: int | None
    """Token that replaces an empty prompt: BOS, else EOS."""
    sampling_defaults: Mapping[str, float]
    blocks_total: int
    block_size: int
    has_encoder: bool
    numerics: str
    """Compute backend: "torch2", "native3-" and the CPU level, or "triton-", its version, a key of the kernels' sources
    and the GPU's compute capability; then the number format, the weights' format if it differs, "-kv_int8" if
    the cache is, "-long" or "-short" for a longrope, and "-deterministic" if all steps on a GPU have one shape."""
    numerics_reason: str
    """Why this backend was chosen, for the log."""
    waits_for_build: bool
    """Whether native kernels support this model and machine, but were not built when the service started."""
    cache_bytes: int = 0
    """Memory that a KV cache on the CPU may take; the system provides it as it is written."""
    model_context: int = 0
    """The model's own context, of which `context` is what fits or what was asked for."""
    weights: str = ""
    """Formats in which the matrices are stored; `dtype` is what steps compute in."""
    weight_bits: float = 0.0
    """Bits per weight of all parameters as they are stored, with scales and offsets; 0 if unknown."""
    named_eos_ids: tuple[int, ...] = ()
    """All end tokens that config.json and generation_config.json name; the latter's alone are `eos_ids`."""


class Fatal(Struct, frozen=True, array_like=True, tag="fatal"):
    """The engine cannot start or continue; `user_error` means that the configuration is wrong."""

    message: str
    user_error: bool


Down = WorkerConfig | Submit | Cancel
Up = Phase | Ready | Fatal | StepReport

_encoder = msgspec.msgpack.Encoder()
decode_down: Callable[[bytes], Down] = msgspec.msgpack.Decoder(Down).decode
"""Decodes a frame that was sent to the engine process."""
decode_up: Callable[[bytes], Up] = msgspec.msgpack.Decoder(Up).decode
"""Decodes a frame that was sent to the API process."""


def encode_frame(message: Down | Up) -> bytes:
    """Encodes a message as a frame (app/common/frames.py)."""
    return encode_body(_encoder.encode(message))


class FrameReceiver:
    """Receives the frames in the pipe, with or without waiting. Raises EOFError once the pipe is closed."""

    def __init__(self, pipe: socket.socket) -> None:
        self._pipe = pipe
        self._frames = FrameDecoder()
        self._poll = select.poll()  # not select(), which fails for descriptors of 1,024 and above
        self._poll.register(pipe, select.POLLIN)

    @property
    def is_closed(self) -> bool:
        """Whether the peer has closed the pipe; frames may still be buffered."""
        return any(event & select.POLLHUP for _, event in self._poll.poll(0))

    def receive(self, wait_seconds: float) -> list[Down]:
        """Returns all frames in the pipe; waits up to `wait_seconds` for the first one."""
        frames: list[Down] = []
        while self._poll.poll(0 if frames else wait_seconds * 1000):
            data = self._pipe.recv(1 << 20)
            if not data:
                raise EOFError
            frames += map(decode_down, self._frames.feed(data))
        return frames
