"""Reference implementation of generation: slow, without a cache, the oracle of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from model.cache_formats import KvCache
from model.nn.attention import Attend, CausalAttend, CrossAttend, EncoderAttend, MemoryAttend
from model.nn.int8_cache import Int8CacheAttend
from model.nn.transformer import Decoder


@torch.inference_mode()
def generate(
    decoder: Decoder,
    prompt: list[int],
    max_tokens: int,
    *,
    source: list[int] | None = None,
    choose: Callable[[Tensor, int], int] | None = None,
    eos_ids: tuple[int, ...] = (),
    kv_cache: KvCache = "auto",
) -> list[int]:
    """The tokens that follow `prompt`, up to and including the first of `eos_ids`.

    source: input of the encoder, if the model has one. choose: (logits [V], position of the new token) -> its id; by
    default greedy, ties go to the lowest id. kv_cache: format of the cache that an engine would have.
    """
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        logits_V = logits(decoder, tokens, source=source, kv_cache=kv_cache)[-1]
        tokens.append(choose(logits_V, len(tokens)) if choose else int(logits_V.argmax()))
        if tokens[-1] in eos_ids:
            break
    return tokens[len(prompt) :]


@torch.inference_mode()
def logits(
    decoder: Decoder, tokens: list[int], *, source: list[int] | None = None, kv_cache: KvCache = "auto"
) -> Tensor:
    """Float32 logits [T, V] of the token that follows each of `tokens`."""
    device, cross = decoder.embedding.device, None
    attend: Attend = CausalAttend(len(tokens), decoder.config.windows, decoder.config.attention_soft_cap)
    if kv_cache == "int8":
        attend = Int8CacheAttend(attend)
    if source is not None:
        source_BS = torch.tensor([source], device=device)
        cross = read_sources(decoder, source_BS, torch.ones_like(source_BS, dtype=torch.bool))
    hidden_TD = decoder(torch.tensor(tokens, device=device), torch.arange(len(tokens), device=device), attend, cross)
    return decoder.head(hidden_TD).float()


def read_sources(decoder: Decoder, tokens_BS: Tensor, real_BS: Tensor) -> CrossAttend:
    """Encodes padded sources. real_BS: True for tokens, False for padding."""
    positions_T = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).repeat(len(tokens_BS))
    return MemoryAttend(decoder.encode(tokens_BS.flatten(), positions_T, EncoderAttend(real_BS)), real_BS)
