"""Adapter of llama.cpp by llama-cpp-python's low-level calls: one batch of all rows per step, greedy by argmax."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from importlib.metadata import version

import llama_cpp
import numpy as np

from benchmarks.peers.adapters.protocol import Adapter, AdapterOptions, UnsupportedError, run

_BATCH = 2048
_PHYSICAL = 512


class Context:
    """A llama_context for a number of rows, and its batch."""

    def __init__(self, model: llama_cpp.llama_model_p, options: AdapterOptions, rows: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = rows * (-(-options.length // 256) * 256)
        params.n_batch, params.n_ubatch, params.n_seq_max = _BATCH, _PHYSICAL, rows
        params.n_threads = params.n_threads_batch = options.threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise UnsupportedError(f"llama.cpp creates no context for {rows} rows")
        self._memory = llama_cpp.llama_get_memory(self._context)
        batch = self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        pointers = (batch.token, batch.pos, batch.logits, batch.n_seq_id)
        views = [np.ctypeslib.as_array(pointer, shape=(_BATCH,)) for pointer in pointers]
        self._tokens, self._positions, self._with_logits, n_rows = views
        n_rows[:] = 1
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, False)

    def read(self, prompt: Sequence[int], row: int) -> int:
        """Prefills a prompt in pieces no longer than a batch; returns the next token."""
        for start in range(0, len(prompt), _BATCH):
            piece = prompt[start : start + _BATCH]
            self._fill_batch(piece, range(start, start + len(piece)), [row] * len(piece), [len(prompt) - start - 1])
            self._run()
        return self._argmax(1)[0]

    def step(self, tokens: Sequence[int], position: int) -> list[int]:
        """Decodes one token per row; returns the next tokens."""
        rows = len(tokens)
        self._fill_batch(tokens, [position] * rows, range(rows), range(rows))
        self._run()
        return self._argmax(rows)

    def _fill_batch(
        self, tokens: Sequence[int], positions: Sequence[int], rows: Sequence[int], with_logits: Sequence[int]
    ) -> None:
        """with_logits: indices whose logits are computed; those beyond this batch are ignored."""
        size = len(tokens)
        self._batch.n_tokens = size
        self._tokens[:size] = tokens
        self._positions[:size] = positions
        for i, row in enumerate(rows):
            self._batch.seq_id[i][0] = row
        self._with_logits[:size] = 0
        self._with_logits[[i for i in with_logits if i < size]] = 1

    def _run(self) -> None:
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode failed with {status}")

    def _argmax(self, rows: int) -> list[int]:
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), shape=(rows, self._vocab_size))
        return list(logits.argmax(axis=1).tolist())


class LlamaCppAdapter(Adapter):
    """One model, with a context for each number of rows, created on first use."""

    def __init__(self, options: AdapterOptions) -> None:
        llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(options.model).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise UnsupportedError(f"llama.cpp cannot load {options.model.name}")
        self._options = options
        self._contexts: dict[int, Context] = {}

    def facts(self) -> dict[str, str]:
        system = llama_cpp.llama_print_system_info().decode()
        switched_on = [part.partition("=")[0].strip() for part in system.split("|") if part.strip().endswith("= 1")]
        return {"version": version("llama-cpp-python"), "built_for": " ".join(switched_on)}

    def decode(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        context = self._context(len(prompts))
        latest = [context.read(prompt, row) for row, prompt in enumerate(prompts)]
        rows = [[token] for token in latest]
        started = time.perf_counter()
        for position in range(len(prompts[0]), len(prompts[0]) + tokens - 1):
            latest = context.step(latest, position)
            for row, token in zip(rows, latest, strict=True):
                row.append(token)
        return time.perf_counter() - started, rows

    def prefill(self, prompt: list[int]) -> float:
        context = self._context(1)
        started = time.perf_counter()
        context.read(prompt, 0)
        return time.perf_counter() - started

    def _context(self, rows: int) -> Context:
        if rows not in self._contexts:
            self._contexts[rows] = Context(self._model, self._options, rows)
        self._contexts[rows].clear()
        return self._contexts[rows]


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _quiet(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    del level, text, data


if __name__ == "__main__":
    run(LlamaCppAdapter)
