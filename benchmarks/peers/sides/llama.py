"""llama.cpp through llama-cpp-python's low-level calls: one batch of all rows a step, the token of a row by argmax."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from importlib.metadata import version

import llama_cpp
import numpy as np

from benchmarks.peers.sides.protocol import CannotError, Generated, Load, Loaded, Task, run

_BATCH = 2048
_PHYSICAL = 512


class Context:
    """A llama_context for so many rows, and the batch that feeds it."""

    def __init__(self, model: llama_cpp.llama_model_p, task: Task, rows: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = rows * (-(-task.length // 256) * 256)
        params.n_batch, params.n_ubatch, params.n_seq_max = _BATCH, _PHYSICAL, rows
        params.n_threads = params.n_threads_batch = task.threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise CannotError(f"llama.cpp makes no context for {rows} rows")
        self._memory = llama_cpp.llama_get_memory(self._context)
        batch = self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        pointers = (batch.token, batch.pos, batch.logits, batch.n_seq_id)
        views = [np.ctypeslib.as_array(pointer, shape=(_BATCH,)) for pointer in pointers]
        self._tokens, self._places, self._wanted, n_rows = views
        n_rows[:] = 1
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, False)

    def read(self, prompt: Sequence[int], row: int) -> int:
        """Takes a prompt in, in pieces no longer than a batch; the token that follows it."""
        for start in range(0, len(prompt), _BATCH):
            piece = prompt[start : start + _BATCH]
            self._fill(piece, range(start, start + len(piece)), [row] * len(piece), [len(prompt) - start - 1])
            self._run()
        return self._best(1)[0]

    def step(self, tokens: Sequence[int], position: int) -> list[int]:
        """One token for every row; the tokens that follow."""
        rows = len(tokens)
        self._fill(tokens, [position] * rows, range(rows), range(rows))
        self._run()
        return self._best(rows)

    def _fill(self, tokens: Sequence[int], places: Sequence[int], rows: Sequence[int], wanted: Sequence[int]) -> None:
        """`wanted`: whose logits are computed; what lies beyond this batch is none of them."""
        size = len(tokens)
        self._batch.n_tokens = size
        self._tokens[:size] = tokens
        self._places[:size] = places
        for i, row in enumerate(rows):
            self._batch.seq_id[i][0] = row
        self._wanted[:size] = 0
        self._wanted[[i for i in wanted if i < size]] = 1

    def _run(self) -> None:
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode failed with {status}")

    def _best(self, rows: int) -> list[int]:
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), shape=(rows, self._vocab_size))
        return list(logits.argmax(axis=1).tolist())


class Llama:
    """One model; a context for each number of rows, made when it is first asked for."""

    def __init__(self, task: Task) -> None:
        llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(task.model).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise CannotError(f"llama.cpp does not load {task.model.name}")
        self._task = task
        self._contexts: dict[int, Context] = {}

    def facts(self) -> dict[str, str]:
        system = llama_cpp.llama_print_system_info().decode()
        switched_on = [part.partition("=")[0].strip() for part in system.split("|") if part.strip().endswith("= 1")]
        return {"version": version("llama-cpp-python"), "built_for": " ".join(switched_on)}

    def decode(self, prompts: list[list[int]], tokens: int) -> Generated:
        context = self._context(len(prompts))
        latest = [context.read(prompt, row) for row, prompt in enumerate(prompts)]
        rows = [[token] for token in latest]
        started = time.perf_counter()
        for position in range(len(prompts[0]), len(prompts[0]) + tokens - 1):
            latest = context.step(latest, position)
            for row, token in zip(rows, latest, strict=True):
                row.append(token)
        return Generated(seconds=time.perf_counter() - started, rows=rows)

    def prefill(self, prompt: list[int]) -> float:
        context = self._context(1)
        started = time.perf_counter()
        context.read(prompt, 0)
        return time.perf_counter() - started

    def serve(self, load: Load) -> Loaded:
        raise CannotError(f"llama-server is measured instead, at {load.streams} streams")

    def _context(self, rows: int) -> Context:
        if rows not in self._contexts:
            self._contexts[rows] = Context(self._model, self._task, rows)
        self._contexts[rows].clear()
        return self._contexts[rows]


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _quiet(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    del level, text, data


if __name__ == "__main__":
    run(Llama)
