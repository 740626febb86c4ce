"""Messages between API process and engine process: length-prefixed msgpack, and the engine's reader.

Down: WorkerConfig once, then Submit, Cancel. Up: Phase while loading, Ready or Fatal, then StepReports.
Nothing is ever unpickled; a frame that does not fit its struct raises msgspec.ValidationError.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec import Struct

from app.common.types import Request, StepReport

_LENGTH = struct.Struct("<I")
_HEADER_BYTES = _LENGTH.size


class WorkerConfig(Struct, frozen=True, kw_only=True, tag="config"):
    """Configuration of the engine process, sent once at its start."""

    weights: str
    files: Mapping[str, str] = {}
    """Where the files of `weights` are open in the API process (model/files.py); none: as they are there."""
    device: str = "auto"
    dtype: str = "auto"
    kernels: Literal["auto", "native", "torch"] = "auto"
    library: str | None = None
    """The native kernels that the service found at its start."""
    cache_dir: str | None = None
    quantize: Literal["none", "int8", "fp8"] = "none"
    deterministic: bool = False
    """Steps of constant shapes, and a proof at the start that no row hangs on its neighbours."""
    threads: int = 0
    replica: int = 0
    """Index of this engine in the pool, from 0; on GPUs also the index of its GPU."""
    replicas: int = 1
    loading_beside: int = 0
    """Engines that take their caches' memory from the same machine at the same time."""
    kv_blocks: int = 0
    gpu_memory_utilization: float = 0.9
    max_context: int = 0
    tokens_per_step: int = 0
    """0: as the device takes them best."""
    prompt_tokens_beside: int = 0
    max_running: int = 32
    heartbeat_seconds: float = 1.0
    silence_seconds: float = 30.0
    """After which it is killed."""
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"

    @property
    def name(self) -> str:
        """What the log calls the engine."""
        return f"engine {self.replica}" if self.replicas > 1 else "engine"


class Submit(Struct, frozen=True, tag="submit"):
    """A new request."""

    request: Request


class Cancel(Struct, frozen=True, tag="cancel"):
    """Cancels a request."""

    request_id: str


class Phase(Struct, frozen=True, array_like=True, tag="phase"):
    """What the engine is doing before it is ready, for people; startup_timer.py knows those that are timed."""

    name: str


class Ready(Struct, frozen=True, kw_only=True, array_like=True, tag="ready"):
    """What was loaded, and what fits."""

    context: int
    vocab_size: int
    n_params: int
    dtype: str
    device: str
    weights_version: str
    eos_ids: tuple[int, ...]
    start_id: int | None
    """The token that an empty prompt stands for: BOS, else EOS."""
    sampling_defaults: Mapping[str, float]
    blocks_total: int
    block_size: int
    has_encoder: bool
    numerics: str
    """What computes: "torch", "native-" and the level of the CPU, or "triton-" and its version; behind it the number
    format, "-int8" or "-fp8" where weights are rounded, and "-deterministic" where a GPU's steps have one shape."""
    numerics_reason: str
    """Why, for the log."""
    waits_for_build: bool
    """Native kernels could compute this model here, and were not built when the service started."""


class Fatal(Struct, frozen=True, array_like=True, tag="fatal"):
    """The engine cannot start or go on; `user_error` means that the configuration is at fault."""

    message: str
    user_error: bool


Down = WorkerConfig | Submit | Cancel
Up = Phase | Ready | Fatal | StepReport

_encoder = msgspec.msgpack.Encoder()
_down = msgspec.msgpack.Decoder(Down)
_up = msgspec.msgpack.Decoder(Up)


class FrameDecoder:
    """Bytes of a pipe in, as they come; the bodies of whole frames out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that `data` completes, in order."""
        data = self._rest + data if self._rest else data
        bodies, start = [], 0
        while len(data) - start >= _HEADER_BYTES:
            body = start + _HEADER_BYTES
            end = body + _LENGTH.unpack_from(data, start)[0]
            if end > len(data):
                break
            bodies.append(data[body:end])
            start = end
        self._rest = data[start:]
        return bodies


def encode_frame(message: Down | Up) -> bytes:
    """The bytes of one frame, length first."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def decode_down(body: bytes) -> Down:
    """A frame for the engine process."""
    frame: Down = _down.decode(body)
    return frame


def decode_up(body: bytes) -> Up:
    """A frame for the API process."""
    frame: Up = _up.decode(body)
    return frame


class FrameReceiver:
    """Frames that have arrived, without waiting where there is other work. Raises EOFError at the pipe's end."""

    def __init__(self, pipe: socket.socket) -> None:
        self._pipe = pipe
        self._frames = FrameDecoder()
        self._poll = select.poll()  # not select(), which fails for descriptors from 1,024 on
        self._poll.register(pipe, select.POLLIN)

    @property
    def is_closed(self) -> bool:
        """Whether the peer has closed the pipe; frames may still be buffered."""
        return any(event & select.POLLHUP for _, event in self._poll.poll(0))

    def receive(self, wait_seconds: float) -> list[Down]:
        """All frames there are; waits up to `wait_seconds` for the first one."""
        frames: list[Down] = []
        while self._poll.poll(0 if frames else wait_seconds * 1000):
            data = self._pipe.recv(1 << 20)
            if not data:
                raise EOFError
            frames += map(decode_down, self._frames.feed(data))
        return frames
