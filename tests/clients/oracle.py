"""A direct forward pass of the model for the client scripts: one JSON request per line in, one response per line out.

{"texts": [str]} -> the ids of every text. {"rows": [[id]]} -> for every row, (log-probability, whether it was the most
likely) of every id but the first. {"prompts": [[id]], "n": int} -> the n greedy ids that follow, as text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from model.checkpoint.checkpoint import load
from model.nn.reference import generate, logits
from model.nn.transformer import Decoder
from model.tokenizer.tokenizer import Tokenizer


def answer(question: dict[str, Any], decoder: Decoder, tokenizer: Tokenizer) -> list[Any]:
    """Output of the model, computed one row at a time."""
    match question:
        case {"texts": texts}:
            return [tokenizer.encode(text) for text in texts]
        case {"rows": rows}:
            return [_score(logits(decoder, row), row) for row in rows]
        case {"prompts": prompts, "n": n}:
            return [tokenizer.decode(generate(decoder, prompt, n)) for prompt in prompts]
    raise ValueError(f"no question of ours: {', '.join(question)}")


def _score(logits_TV: torch.Tensor, row: list[int]) -> list[tuple[float, bool]]:
    logprobs_TV = logits_TV[:-1].double().log_softmax(-1)
    chosen_T = logprobs_TV.gather(1, torch.tensor(row[1:])[:, None])[:, 0]
    return list(zip(chosen_T.tolist(), (chosen_T == logprobs_TV.amax(-1)).tolist(), strict=True))


def main(directory: Path) -> None:
    """Answers requests until stdin ends."""
    decoder = load(directory, device=torch.device("cpu"), dtype=torch.float32).decoder
    tokenizer = Tokenizer.load(directory)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), decoder, tokenizer)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
