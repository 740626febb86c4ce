"""Cost of number formats in model quality, in bits per byte: `python -m benchmarks.quality --text FILE...`.

All variants score the same windows of tokens: the log-probability of each token but the first. Bits per byte are
comparable between tokenizers and machines; lower is better. fp8 needs a GPU, so its rounding is emulated on the CPU.
The last line is one JSON object.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

import torch

from app.common.ipc import WorkerConfig
from app.common.types import Request, SamplingParams
from app.engine.cpu.toolchain.builder import find_or_build
from app.engine.execution.engine import Engine
from app.engine.gpu.linears import quantize_decoder
from app.engine.startup import build_engine
from benchmarks.common import command_line, print_result
from model.checkpoint.checkpoint import load
from model.checkpoint.tensor_index import check_layout
from model.files import one_line
from model.nn.reference import logits
from model.tokenizer.tokenizer import Tokenizer

Window = tuple[int, ...]
Reader = Callable[[Sequence[Window]], Iterable[float]]
"""Maps windows to the log-probability of each token but a window's first, in any order."""
_MIN_TOKENS = 2
"""The first token of a window is not scored."""
EMULATED_FP8 = "emulated bfloat16 fp8"
_QUANTIZE: tuple[Literal["none", "int8"], ...] = ("none", "int8")
_KERNELS: tuple[Literal["torch", "native"], ...] = ("torch", "native")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Result of one variant."""

    way: str
    bits_per_byte: float
    percent: float
    """Increase over the first variant."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = command_line("quality", __doc__)
    parser.add_argument("--weights", type=Path, default=Path("weights"), help="weights directory")
    parser.add_argument(
        "--text", type=Path, nargs="+", required=True, help="text files that the model was not trained on"
    )
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens to score")
    options = parser.parse_args(arguments)
    try:
        results = _measure(options.weights, options.text, options.tokens)
    except ValueError as error:  # of weights, text or compiler; the message names which
        parser.exit(2, one_line(f"error: {error}") + "\n")
    print_result("quality", tokens=options.tokens, ways=results)
    return 0


def _measure(weights: Path, files: Sequence[Path], n_tokens: int) -> list[Quality]:
    """Measures the variants, and prints each at once. Raises ValueError."""
    if n_tokens < _MIN_TOKENS:
        raise ValueError(f"--tokens must be at least {_MIN_TOKENS}, not {n_tokens}")
    check_layout(weights)
    tokenizer = Tokenizer.load(weights)
    text = "\n".join(map(_read, files))
    if len(tokenizer.encode(text[: 1 << 16])) < _MIN_TOKENS:
        raise ValueError(f"--text {', '.join(map(str, files))}: is too short: {_MIN_TOKENS} tokens are the least")
    results: list[Quality] = []
    print(f"{'way':24} {'bits per byte':>14} {'more':>9}")
    for variant, context, read in _variants(weights):
        bits = bits_per_byte(read, context, tokenizer, text, n_tokens)
        first = results[0].bits_per_byte if results else bits
        results.append(Quality(way=variant, bits_per_byte=bits, percent=100 * (bits / first - 1)))
        print(f"{variant:24} {bits:14.5f} {results[-1].percent:+8.3f} %", flush=True)
    return results


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--text {file}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"--text {file}: is not UTF-8; convert it (iconv -t utf-8)") from None


def bits_per_byte(read: Reader, context: int, tokenizer: Tokenizer, text: str, n_tokens: int) -> float:
    """Bits per byte over the first `n_tokens` tokens, each predicted from those before it in its window."""
    ids = tokenizer.encode(text)[:n_tokens]
    windows = [tuple(ids[start : start + context]) for start in range(0, len(ids) - 1, context)]
    bytes_of = tokenizer.bytes_of
    nats = -sum(read(windows))
    n_bytes = sum(len(bytes_of[token]) for window in windows for token in window[1:])
    return nats / math.log(2) / n_bytes


def _log_probabilities(engine: Engine, windows: Sequence[Window]) -> Iterator[float]:
    for number, window in enumerate(windows):
        engine.add(Request(id=str(number), prompt=window, max_tokens=0, params=SamplingParams(), prompt_logprobs=0))
    while engine.has_work:
        for scores in engine.step().scores:
            yield from (logprob for logprob, _top in scores.tokens)


def _variants(weights: Path) -> Iterator[tuple[str, int, Reader]]:
    """Name, context length and scorer of each variant."""
    library = str(find_or_build(None))
    for dtype in ("float32", "bfloat16"):
        for quantize in _QUANTIZE:
            for kernels in _KERNELS:
                name = f"{kernels} {dtype}{f' {quantize}' if quantize != 'none' else ''}"
                config = WorkerConfig(
                    weights=str(weights), dtype=dtype, kernels=kernels, library=library, quantize=quantize
                )
                assembled = build_engine(config)
                yield name, assembled.ready.context, partial(_log_probabilities, assembled.engine)
    emulated = EmulatedFp8Decoder(weights)
    yield EMULATED_FP8, emulated.context, lambda windows: chain.from_iterable(map(emulated.log_probabilities, windows))


class EmulatedFp8Decoder:
    """A decoder in bfloat16 with the rounding of `--quantize fp8`, emulated on the CPU."""

    def __init__(self, weights: Path) -> None:
        self._decoder = load(weights, device=torch.device("cpu"), dtype=torch.bfloat16).decoder
        self.context = self._decoder.config.context
        quantize_decoder(self._decoder, "fp8")

    def log_probabilities(self, window: tuple[int, ...]) -> list[float]:
        """Log-probability of each token but the first."""
        logprobs_TV = logits(self._decoder, list(window))[:-1].log_softmax(-1)
        logprobs_T: list[float] = logprobs_TV.gather(1, torch.tensor(window[1:])[:, None])[:, 0].tolist()
        return logprobs_T


if __name__ == "__main__":
    sys.exit(main())
