"""Adapter of vLLM's LLMEngine on the CPU, stepped by hand in this process."""

from __future__ import annotations

from importlib.metadata import version

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind

from benchmarks.peers.adapters.protocol import AdapterOptions, SteppedAdapter, UnsupportedError, run

_DTYPES = {"bf16": "bfloat16", "f32": "float32"}
_KV_CACHE_BYTES = 2 << 30


class VLLMAdapter(SteppedAdapter):
    """One engine without prefix cache. Its requests end at their number of tokens."""

    def __init__(self, options: AdapterOptions) -> None:
        if options.precision not in _DTYPES:
            raise UnsupportedError(f"{options.precision} needs a checkpoint that was quantized before")
        arguments = EngineArgs(
            model=str(options.model),
            dtype=_DTYPES[options.precision],
            max_num_seqs=options.batch,
            # Every prompt is prefilled in one step, so that all rows take their first decode step together.
            max_num_batched_tokens=options.batch * 64 + 1024,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=_KV_CACHE_BYTES,
            generation_config="vllm",
            disable_log_stats=True,
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        self._new_tokens: list[list[int]] = []

    def facts(self) -> dict[str, str]:
        mode = self._engine.vllm_config.compilation_config.mode
        return {"version": version("vllm"), "torch": version("torch"), "compilation": mode.name}

    def add(self, prompt: list[int] | str, tokens: int, temperature: float = 0.0, seed: int = 0) -> int:
        params = SamplingParams(
            temperature=temperature,
            seed=seed if temperature else None,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        number = len(self._new_tokens)
        self._engine.add_request(
            str(number), prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}, params
        )
        self._new_tokens.append([])
        return number

    def step(self) -> None:
        for output in self._engine.step():
            self._new_tokens[int(output.request_id)] += output.outputs[0].token_ids

    def is_busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def take(self, request: int) -> list[int]:
        tokens, self._new_tokens[request] = self._new_tokens[request], []
        return tokens


if __name__ == "__main__":
    run(VLLMAdapter)
