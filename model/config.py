"""The shape of one decoder. Knows nothing of files, tensors or serving."""

from __future__ import annotations

from dataclasses import dataclass


class ConfigError(ValueError):
    """A shape that no decoder can have; the message says which number to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A llama-layout decoder: RMSNorm before each sublayer, rotary positions, grouped-query attention, SwiGLU.

    Sources: RMSNorm arXiv:1910.07467, RoPE arXiv:2104.09864, GQA arXiv:2305.13245, SwiGLU arXiv:2002.05202.
    """

    vocab_size: int
    """Rows of the token embedding."""
    width: int
    """Size of the residual stream."""
    n_layers: int
    """Decoder blocks."""
    n_heads: int
    """Query heads."""
    n_kv_heads: int
    """Key and value heads; each serves n_heads / n_kv_heads query heads."""
    head_dim: int
    """Size of one head; even, because RoPE turns pairs."""
    mlp_width: int
    """Hidden size of the feed-forward."""
    context: int
    """Longest sequence in tokens."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tied_head: bool = True
    """Whether the output projection is the token embedding."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "n_layers", "n_heads", "n_kv_heads", "head_dim", "mlp_width", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**31 - 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads})")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary positions, not {self.head_dim}")
        if not self.rope_theta > 0 or not self.norm_eps > 0:
            raise ConfigError(f"rope_theta ({self.rope_theta}) and norm_eps ({self.norm_eps}) must be above 0")

    @property
    def n_params(self) -> int:
        """Trainable numbers, a tied head counted once."""
        attention = self.width * self.head_dim * (2 * self.n_heads + 2 * self.n_kv_heads)
        block = attention + 3 * self.width * self.mlp_width + 2 * self.width
        embeddings = self.vocab_size * self.width * (1 if self.tied_head else 2)
        return embeddings + self.n_layers * block + self.width

    @property
    def kv_numbers_per_token(self) -> int:
        """Numbers the KV cache holds for one token, over all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim


def preset(name: str) -> ModelConfig:
    """The shape called `name`; sizes and training times are in README.md."""
    if name not in _PRESETS:
        raise ConfigError(f"no preset is called {name!r}; there are {', '.join(PRESET_NAMES)}")
    return _PRESETS[name]


def _llama(layers: int, width: int, heads: int, kv_heads: int, mlp: int, vocab: int, context: int) -> ModelConfig:
    return ModelConfig(
        n_layers=layers,
        width=width,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=64 if width > 128 else 32,
        mlp_width=mlp,
        vocab_size=vocab,
        context=context,
    )


_PRESETS = {
    "nano": _llama(4, 128, 4, 2, 352, 1024, 256),
    "small": _llama(5, 256, 4, 2, 704, 4096, 512),
    "base": _llama(8, 384, 6, 2, 896, 8192, 1024),
}
PRESET_NAMES = tuple(_PRESETS)
