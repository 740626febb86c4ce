"""Cost of number formats in model quality, in bits per byte: `python -m benchmarks.quality --text FILE...`.

All variants score the same windows of tokens: the log-probability of each token but the first. Bits per byte are
comparable between tokenizers and machines; lower is better. fp8 needs a GPU, so its rounding is emulated on the CPU.
The last line is one JSON object.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal, get_args

import torch

from app.common.ipc import WorkerConfig
from app.common.types import Request, SamplingParams
from app.engine.cpu.toolchain.builder import find_or_build
from app.engine.execution.engine import Engine
from app.engine.gpu.linears import quantize_decoder
from app.engine.startup import build_engine
from benchmarks.common import command_line, print_result
from model.cache_formats import KvCache
from model.checkpoint.checkpoint import load
from model.files import one_line
from model.nn.reference import logits
from model.nn.transformer import Decoder
from model.tokenizer.tokenizer import Tokenizer
from model.weight_formats import QUANTIZE, needs_gpu

Windows = Sequence[tuple[int, ...]]
Scorer = Callable[[Windows], Iterable[float]]
"""Maps windows to the log-probability of each token but a window's first, in any order."""
_KERNELS: tuple[Literal["torch", "native"], ...] = ("torch", "native")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = command_line("quality", __doc__)
    add = parser.add_argument
    add("--weights", type=Path, default=Path("weights"), help="weights directory")
    add("--text", type=Path, nargs="+", required=True, help="text files that the model was not trained on")
    add("--tokens", type=int, default=100_000, help="tokens to score")
    options = parser.parse_args(arguments)
    try:
        decoder = load(options.weights, device=torch.device("cpu"), dtype=torch.bfloat16).decoder
        tokenizer = Tokenizer.load(options.weights)
        text = "\n".join(file.read_text(encoding="utf-8") for file in options.text)
        ids, context = tokenizer.encode(text)[: max(options.tokens, 0)], decoder.config.context
        windows = [tuple(ids[start : start + context]) for start in range(0, len(ids) - 1, context)]
        if not windows:
            raise ValueError("--text and --tokens must give at least 2 tokens")
        n_bytes = sum(len(tokenizer.bytes_of[token]) for window in windows for token in window[1:])
        results: dict[str, float] = {}
        print(f"{'way':28} {'bits per byte':>14} {'more':>9}")
        for name, scorer in _variants(options.weights, decoder):
            results[name] = bits = -sum(scorer(windows)) / math.log(2) / n_bytes
            print(f"{name:28} {bits:14.5f} {100 * (bits / next(iter(results.values())) - 1):+8.3f} %", flush=True)
    except (ValueError, OSError) as error:  # of weights, text or compiler; the message names which
        parser.exit(2, one_line(f"error: {error}") + "\n")
    print_result("quality", tokens=options.tokens, bits_per_byte=results)
    return 0


def _variants(weights: Path, decoder: Decoder) -> Iterator[tuple[str, Scorer]]:
    library = str(find_or_build(None))
    for dtype in ("float32", "bfloat16"):
        for quantize in (each for each in QUANTIZE if not needs_gpu(each)):
            for kernels, kv_cache in product(_KERNELS, get_args(KvCache)):
                formats = [*[quantize] * (quantize != "none"), *["kv_int8"] * (kv_cache == "int8")]
                config = WorkerConfig(
                    weights=str(weights),
                    dtype=dtype,
                    kernels=kernels,
                    speculate="off",
                    library=library,
                    quantize=quantize,
                    kv_cache=kv_cache,
                )
                yield " ".join((kernels, dtype, *formats)), partial(_score, build_engine(config).engine)
    quantize_decoder(decoder)
    yield "emulated bfloat16 fp8", partial(_score_by_reference, decoder)


def _score(engine: Engine, windows: Windows) -> Iterator[float]:
    for number, window in enumerate(windows):
        engine.add(Request(id=str(number), prompt=window, max_tokens=0, params=SamplingParams(), prompt_logprobs=0))
    while engine.has_work:
        for scores in engine.step().scores:
            yield from (logprob for logprob, _top in scores.tokens)


def _score_by_reference(decoder: Decoder, windows: Windows) -> Iterator[float]:
    for window in windows:
        logprobs_TV = logits(decoder, list(window))[:-1].log_softmax(-1)
        yield from logprobs_TV.gather(1, torch.tensor(window[1:])[:, None])[:, 0].tolist()


if __name__ == "__main__":
    sys.exit(main())
