"""Adapter of inkstream's engine in this process, built as the service builds it; no pipe, no text, no HTTP."""

from __future__ import annotations

import time
from importlib.metadata import version
from itertools import count
from typing import Any

from app.common.ipc import WorkerConfig
from app.common.types import Request, SamplingParams
from app.engine.startup import build_engine
from app.engine.worker_loop import EngineStartError
from benchmarks.peers.adapters.protocol import (
    Adapter,
    AdapterOptions,
    DecodeResult,
    ServeLoad,
    ServeResult,
    UnsupportedError,
    run,
)
from model.tokenizer.tokenizer import Tokenizer

_DTYPES = {"bf16": "bfloat16", "f32": "float32", "int8": "bfloat16"}
_BLOCK = 16


class InkstreamAdapter(Adapter):
    """inkstream's engine. Prompts differ from call to call, so that the prefix cache does not help."""

    def __init__(self, options: AdapterOptions) -> None:
        config: dict[str, Any] = {
            "weights": str(options.model),
            "device": "cpu",
            "kernels": "native",
            "dtype": _DTYPES[options.precision],
            "threads": options.threads,
            "max_running": options.batch,
            # Every prompt is prefilled in one step, so that all rows take their first decode step together.
            "tokens_per_step": options.batch * 64 + 1024,
            "kv_blocks": options.batch * (options.length // _BLOCK + 2),
        }
        if options.precision == "int8":
            config["quantize"] = "int8"
        try:
            assembled = build_engine(WorkerConfig(**config))
        except EngineStartError as error:
            raise UnsupportedError(str(error)) from None
        self._engine, self._ready = assembled.engine, assembled.ready
        self._tokenizer = Tokenizer.load(options.model)
        self._numbers = count()

    def facts(self) -> dict[str, str]:
        return {"version": version("inkstream"), "torch": version("torch"), "kernels": self._ready.numerics}

    def decode(self, prompts: list[list[int]], tokens: int) -> DecodeResult:
        rows = self._add(prompts, tokens)
        while not all(rows.values()):
            self._step(rows)
        assert all(len(row) == 1 for row in rows.values()), "the prompts were not read in one step"
        started = time.perf_counter()
        while self._engine.has_work:
            self._step(rows)
        return DecodeResult(seconds=time.perf_counter() - started, rows=list(rows.values()))

    def prefill(self, prompt: list[int]) -> float:
        rows = self._add([prompt], 1)
        started = time.perf_counter()
        while self._engine.has_work:
            self._step(rows)
        return time.perf_counter() - started

    def serve(self, load: ServeLoad) -> ServeResult:
        """Takes a server's load without the service around the engine, as a reference for the whole service."""
        waiting = [tuple(self._tokenizer.encode(prompt)) for prompt in load.prompts]
        arrivals_by_request: dict[str, tuple[float, list[float]]] = {}
        first: list[float] = []
        gaps: list[float] = []
        began = time.perf_counter()
        while waiting or arrivals_by_request:
            while waiting and len(arrivals_by_request) < load.streams:
                name = str(next(self._numbers))
                params = SamplingParams(temperature=load.temperature, seed=int(name))
                self._engine.add(Request(id=name, prompt=waiting.pop(0), max_tokens=load.tokens, params=params))
                arrivals_by_request[name] = time.perf_counter(), []
            report = self._engine.step()
            now = time.perf_counter()
            for event in report.events:
                sent, arrivals = arrivals_by_request[event.request_id]
                (gaps if arrivals else first).append(now - (arrivals[-1] if arrivals else sent))
                arrivals.append(now)
                if event.finish:
                    del arrivals_by_request[event.request_id]
        return ServeResult(seconds=time.perf_counter() - began, tokens=len(first) + len(gaps), first=first, gaps=gaps)

    def _add(self, prompts: list[list[int]], tokens: int) -> dict[str, list[int]]:
        rows: dict[str, list[int]] = {}
        for prompt in prompts:
            name = str(next(self._numbers))
            rows[name] = []
            greedy = SamplingParams(temperature=0)
            self._engine.add(Request(id=name, prompt=tuple(prompt), max_tokens=tokens, params=greedy))
        return rows

    def _step(self, rows: dict[str, list[int]]) -> None:
        report = self._engine.step()
        assert not report.failed, report.failed
        for event in report.events:
            assert event.token is not None
            rows[event.request_id].append(event.token)


if __name__ == "__main__":
    run(InkstreamAdapter)
