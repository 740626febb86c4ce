"""Computes golden.json (model/checkpoint/golden.py) of a decoder, and compares a decoder with it."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from model.checkpoint.golden import read_golden
from model.nn.reference import logits
from model.nn.transformer import Decoder
from model.weights_version import Directory


def golden_file(decoder: Decoder, prompt: list[int]) -> bytes:
    """Content for `prompt` of at least 2 ids. `decoder` must be float32 on the CPU; see as_stored()."""
    assert len(prompt) > 1, "the first token has no log-probability"
    logprobs = [round(value, 6) for value in _logprobs(decoder, prompt).tolist()]
    return (json.dumps({"prompt": prompt, "logprobs": logprobs}) + "\n").encode()


def as_stored(decoder: Decoder, dtype: torch.dtype) -> Decoder:
    """A copy in float32 on the CPU whose values are rounded to `dtype`, as they are stored."""
    state = {name: tensor.detach().to("cpu", dtype).float() for name, tensor in decoder.state_dict().items()}
    stored = Decoder(decoder.config).requires_grad_(False).eval()
    stored.load_state_dict(state, assign=True)
    return stored


def verify(decoder: Decoder, directory: Directory) -> float | None:
    """The largest difference from golden.json; None without the file. Raises CheckpointError beyond TOLERANCE.

    `decoder` must be float32 on the CPU.
    """
    golden = read_golden(directory, decoder.config)
    return None if golden is None else golden.compare(_logprobs(decoder, list(golden.prompt)).tolist())


def golden_loss(decoder: Decoder, directory: Directory) -> float | None:
    """See Golden.loss: of a decoder whose weights are rounded; None without golden.json. Raises CheckpointError."""
    golden = read_golden(directory, decoder.config)
    return None if golden is None else golden.loss(_logprobs(decoder, list(golden.prompt)).tolist())


def _logprobs(decoder: Decoder, prompt: list[int]) -> Tensor:
    assert decoder.embedding.dtype == torch.float32 and decoder.embedding.device.type == "cpu"
    source = prompt if decoder.config.n_encoder_layers else None
    logprobs_TV = logits(decoder, prompt, source=source)[:-1].log_softmax(-1)
    return logprobs_TV.gather(1, torch.tensor(prompt[1:])[:, None]).squeeze(1)
