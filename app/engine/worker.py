"""The engine process: inbox -> step -> report, until the pipe closes. The only file with both torch and the pipe.

Started by app/engine/client.py as `python -m app.engine.worker FD`. The end of the pipe means that the API process is
gone, and this process goes with it.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
from msgspec.structs import replace

from app.engine.blocks import BlockPool
from app.engine.defaults import sampling_defaults
from app.engine.door import Door
from app.engine.engine import Engine
from app.engine.frames import Cancel, Down, Fatal, Phase, Ready, Submit, Up, WorkerConfig, encode_frame
from app.engine.guides import Guides
from app.engine.inbox import Inbox
from app.engine.kv_cache import KVCache
from app.engine.memory import CacheRoom, choose_context, free_memory
from app.engine.runner import Runner
from app.engine.scheduler import Scheduler, SchedulerLimits
from app.engine.source_cache import SourceCache
from app.engine.types import Started, StepReport
from model.checkpoint import Checkpoint, load
from model.device import choose_device, choose_dtype, describe
from model.tokenizer import Tokenizer

Send = Callable[[Up], None]


class StartError(ValueError):
    """The configuration does not work; the message says what to change."""


def main(descriptor: int) -> int:
    """Runs until the pipe closes. Exit codes: 0 closed, 1 failed, 2 bad configuration."""
    # systemd signals every process of a service; the API process decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    pipe = socket.socket(fileno=descriptor)
    inbox = Inbox(pipe)

    def send(message: Up) -> None:
        pipe.sendall(encode_frame(message))

    try:
        config = _first_frame(inbox)
        engine, guides, ready = _build(config, send)
        send(ready)
        _serve(
            engine,
            Door(guides.prepare, guides.forget, lambda: guides.n_prepared, most=config.max_running),
            inbox,
            send,
            config.heartbeat_seconds,
        )
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    except StartError as error:
        send(Fatal(str(error), user_error=True))
        return 2
    except Exception as error:
        traceback.print_exc()
        send(Fatal(f"{type(error).__name__} in the engine", user_error=False))
        return 1


def _serve(engine: Engine, door: Door, inbox: Inbox, send: Send, heartbeat_seconds: float) -> NoReturn:
    def report(step: StepReport) -> None:
        waiting = step.counters.waiting + door.n_waiting
        send(replace(step, at=time.monotonic(), counters=replace(step.counters, waiting=waiting)))

    def announce(started: tuple[Started, ...]) -> None:
        report(StepReport(started=started, counters=engine.scheduler.counters))

    while True:
        for frame in inbox.receive(0.0 if engine.has_work else door.wait_seconds(heartbeat_seconds)):
            if isinstance(frame, Submit):
                is_guided = frame.request.guide and frame.request.max_tokens
                (door.enter if is_guided else engine.add)(frame.request)
            elif isinstance(frame, Cancel):
                engine.cancel(frame.request_id)
                door.cancel(frame.request_id)
        for request in door.leave():
            engine.add(request)
        if engine.has_work:
            done = engine.step(announce)
            report(done)
            door.settle(done)
        else:
            report(StepReport(counters=engine.scheduler.counters))


def _build(config: WorkerConfig, send: Send) -> tuple[Engine, Guides, Ready]:
    """Loads the weights, takes the cache's memory, warms up. Raises StartError."""
    send(Phase("loading weights"))
    try:
        if config.threads:
            torch.set_num_threads(config.threads)
        device = choose_device(config.device)
        dtype = choose_dtype(config.dtype, device)
        checkpoint = load(Path(config.weights), device=device, dtype=dtype)
        defaults = sampling_defaults(checkpoint.generation, Path(config.weights) / "generation_config.json")
        limits = SchedulerLimits(tokens_per_step=config.tokens_per_step, max_running=config.max_running)
        shape, block_size = checkpoint.decoder.config, 16 if device.type == "cpu" else 64
        context = choose_context(shape, config.max_context)
        room = CacheRoom(
            shape=shape, context=context, block_size=block_size, max_running=config.max_running, dtype=dtype
        )
        blocks = room.blocks(config.kv_blocks, free_memory(device))
    except ValueError as error:
        raise StartError(str(error)) from None
    decoder, slots = checkpoint.decoder, config.max_running
    cache = KVCache(shape, blocks=blocks, block_size=block_size, dtype=dtype, device=device)
    has_encoder = shape.n_encoder_layers > 0
    sources = SourceCache(decoder, slots=slots, context=context, dtype=dtype, device=device) if has_encoder else None
    guides = Guides(
        lambda: Tokenizer.load(Path(config.weights)).bytes_of, vocab_size=shape.vocab_size, most=config.max_running
    )
    runner = Runner(decoder, cache, sources, guides)
    send(Phase("warming up"))
    runner.warm_up(config.max_running)
    pool = BlockPool(blocks, block_size)
    ready = _ready(checkpoint, context, defaults, dtype, device, pool)
    return Engine(Scheduler(limits, pool, checkpoint.version), runner), guides, ready


def _ready(
    checkpoint: Checkpoint,
    context: int,
    defaults: dict[str, float],
    dtype: torch.dtype,
    device: torch.device,
    blocks: BlockPool,
) -> Ready:
    shape = checkpoint.decoder.config
    return Ready(
        context=context,
        vocab_size=shape.vocab_size,
        n_params=checkpoint.decoder.n_params,
        dtype=str(dtype).removeprefix("torch."),
        device=describe(device),
        weights_version=checkpoint.version,
        eos_ids=checkpoint.eos_ids,
        sampling_defaults=defaults,
        start_id=checkpoint.bos_id if checkpoint.bos_id is not None else next(iter(checkpoint.eos_ids), None),
        blocks_total=blocks.total,
        block_size=blocks.block_size,
        has_encoder=shape.n_encoder_layers > 0,
    )


def _first_frame(inbox: Inbox) -> WorkerConfig:
    frames: list[Down] = []
    while not frames:
        frames = inbox.receive(60.0)
    assert isinstance(frames[0], WorkerConfig), "the first frame tells the configuration"
    return frames[0]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
