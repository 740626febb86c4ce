"""Adapter of inkstream's engine in this process, built as the service builds it; no pipe, no text, no HTTP."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from app.common.ipc import WorkerConfig
from app.common.types import Request, SamplingParams
from app.engine.startup import build_engine
from app.engine.worker_loop import EngineStartError
from benchmarks.peers.adapters.protocol import AdapterOptions, SteppedAdapter, UnsupportedError, run
from model.checkpoint.config_file import load_config
from model.tokenizer.tokenizer import Tokenizer

_BLOCK = 16


def dtype_for(precision: str, directory: Path) -> str:
    """The value of --dtype: auto, which rounds no bfloat16 file, or what rounds others as the peers do."""
    if precision == "f32":
        return "float32"
    config = json.loads((directory / "config.json").read_text())
    return "auto" if "bfloat16" in (config.get("torch_dtype"), config.get("dtype")) else "bfloat16"


def quantize_for(precision: str) -> Literal["none", "int8", "int4"]:
    """The value of --quantize."""
    return "int8" if precision == "int8" else "int4" if precision == "int4" else "none"


class InkstreamAdapter(SteppedAdapter):
    """inkstream's engine. Prompts differ from call to call, so that the prefix cache does not help."""

    def __init__(self, options: AdapterOptions) -> None:
        config = WorkerConfig(
            weights=str(options.model),
            device="cpu",
            kernels="native",
            speculate="off",  # random weights repeat themselves, which no peer makes use of
            dtype=dtype_for(options.precision, Path(options.model)),
            quantize=quantize_for(options.precision),
            threads=options.threads,
            max_running=options.batch,
            # Every prompt is prefilled in one step, so that all rows take their first decode step together.
            tokens_per_step=options.batch * 64 + 1024,
            kv_blocks=max(load_config(options.model).context, options.batch * (options.length + 2 * _BLOCK)) // _BLOCK,
        )
        try:
            assembled = build_engine(config)
        except EngineStartError as error:
            raise UnsupportedError(str(error)) from None
        self._engine, self._ready = assembled.engine, assembled.ready
        self._tokenizer = Tokenizer.load(options.model)
        self._new_tokens: list[list[int]] = []

    def facts(self) -> dict[str, str]:
        return {"version": version("inkstream"), "torch": version("torch"), "kernels": self._ready.numerics}

    def add(self, prompt: list[int] | str, tokens: int, temperature: float = 0.0, seed: int = 0) -> int:
        number = len(self._new_tokens)
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        params = SamplingParams(temperature=temperature, seed=seed)
        self._engine.add(Request(id=str(number), prompt=tuple(ids), max_tokens=tokens, params=params))
        self._new_tokens.append([])
        return number

    def step(self) -> None:
        report = self._engine.step()
        assert not report.failed, report.failed
        for event in report.events:
            assert event.token is not None
            self._new_tokens[int(event.request_id)].append(event.token)

    def is_busy(self) -> bool:
        return self._engine.has_work

    def take(self, request: int) -> list[int]:
        tokens, self._new_tokens[request] = self._new_tokens[request], []
        return tokens


if __name__ == "__main__":
    run(InkstreamAdapter)
