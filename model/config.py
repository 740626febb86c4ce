"""ModelConfig: the architecture of one decoder."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

Norm = Literal["rmsnorm", "layernorm", "none"]
NormPosition = Literal["pre", "post", "output", "sandwich"]
Positions = Literal["learned", "sinusoidal", "none"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "relu2", "xielu", "swiglu_clamped"]
"""swiglu_clamped: (up + 1) * gate * sigmoid(1.702 * gate), with gate at most 7 and up from -7 to 7."""
ExpertScore = Literal["softmax", "sigmoid", "softmax_of_chosen"]
QkNorm = Literal["none", "head", "width"]
ScaleBy = Literal["head_dim", "width"]
RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[float, Meta(gt=0, le=2**53)]
"""JSON integers can have any length: larger ones are not exact as floats."""
RopeFactor = Annotated[float, Meta(ge=2**-20, le=2**53)]
"""A smaller one makes angles overflow."""
RopeBase = Annotated[float, Meta(ge=1, le=2**53)]
"""A smaller one makes wavelengths grow shorter, and overflows if it is tiny."""


MAX_LAYER_KINDS = 64
MAX_EXPERTS = 4096
MAX_ROPE_FACTORS = 4096


class ConfigError(ValueError):
    """An invalid decoder configuration; the message names the field to change."""


_annotations: Callable[[Any], dict[str, Any]] = functools.cache(partial(get_type_hints, include_extras=True))


def _check_fields(config: Part, suffix: str = "") -> None:
    """Checks every field by its annotation. Raises ConfigError."""
    for name, kind in _annotations(type(config)).items():
        check_value(getattr(config, name), kind, f"{name}{suffix}")


def check_value(value: object, kind: Any, name: str) -> None:
    """Checks a value that a file calls `name` by an annotation, such as Size. Raises ConfigError."""
    try:
        msgspec.convert(value, kind, from_attributes=True)
    except msgspec.ValidationError as error:
        choices = f"; it must be one of {', '.join(get_args(kind))}" if get_origin(kind) is Literal else ""
        raise ConfigError(f"{name} cannot be {value!r:.80}: {error}{choices}") from None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions (arXiv:2104.09864): pairs of dimensions of a head are rotated by position times frequency.

    kind: default: the wavelengths as trained. linear: multiplies every wavelength by `factor` (arXiv:2306.15595).
    llama3: scales wavelengths longer than original_context / low_freq_factor, keeps those shorter than
    original_context / high_freq_factor, and interpolates between them. yarn (arXiv:2309.00071): multiplies wavelengths
    that fit into original_context less than beta_slow times by `factor`, keeps those that fit more than beta_fast
    times, and interpolates by dimension. longrope (arXiv:2402.13753): multiplies each wavelength by its own number of
    long_factors if the served context is longer than original_context, otherwise of short_factors.
    """

    theta: RopeBase = 10_000.0
    """Base of the wavelengths."""
    dim: Size | None = None
    """Number of dimensions of each head that are rotated; None means all."""
    kind: RopeKind = "default"
    factor: RopeFactor = 1.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_context: Size = 8192
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True
    """Whether yarn interpolates between whole dimensions."""
    attention_factor: Positive = 1.0
    """Factor of rotated queries and keys (of yarn and longrope): of cosines and sines."""
    short_factors: tuple[RopeFactor, ...] = ()
    long_factors: tuple[RopeFactor, ...] = ()

    def __post_init__(self) -> None:
        _check_fields(self, " of the rope")
        _require(self.low_freq_factor < self.high_freq_factor, "low_freq_factor must be below high_freq_factor")
        _require(self.beta_slow <= self.beta_fast, "beta_slow must not be above beta_fast")
        _require(self.kind != "yarn" or self.theta > 1.0, "yarn needs a theta above 1")
        counts = {len(self.short_factors), len(self.long_factors)}
        _require(
            len(counts) == 1 and max(counts) <= MAX_ROPE_FACTORS and (counts == {0}) == (self.kind != "longrope"),
            "short_factors and long_factors must have one number for each pair of rotated dimensions, if and only if "
            f"the kind is longrope, not {len(self.short_factors)} and {len(self.long_factors)}",
        )

    def is_long(self, context: int) -> bool:
        """Whether long_factors are used at this context, which decides for sequences of any length."""
        return self.kind == "longrope" and context > self.original_context


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScale:
    """Factor of the queries at position p: 1 + beta * ln(1 + floor(p / original_context)) (arXiv:2501.19399)."""

    beta: Positive
    original_context: Size

    def __post_init__(self) -> None:
        _check_fields(self, " of the query_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts (arXiv:2101.03961, arXiv:2401.04088): a router chooses a few feed-forwards for each token.

    score: of an expert, from the router's logits: softmax or sigmoid over all experts, or softmax_of_chosen, where the
    logits choose, and the softmax is over the chosen ones.
    """

    count: Annotated[int, Meta(ge=1, le=MAX_EXPERTS)]
    """Experts of a layer."""
    chosen: Size
    """Experts of a token: those with the largest scores; of equal ones the first."""
    width: Size
    """Hidden size of one expert."""
    score: ExpertScore = "softmax"
    normalized: bool = False
    """Whether the weights are the chosen scores divided by their sum (by 1e-12 if that is less)."""
    factor: Positive = 1.0
    """Of the weights, after that."""
    router_bias: bool = False
    """A bias of the router's logits."""
    choice_bias: bool = False
    """A bias of the scores, for the choice only (arXiv:2408.15664)."""
    bias: bool = False
    """Biases of the experts' products."""
    shared_width: Count = 0
    """Hidden size of the shared expert, a feed-forward that every token passes; 0 means none."""

    def __post_init__(self) -> None:
        _check_fields(self, " of the experts")
        _require(
            self.chosen <= self.count, f"chosen of the experts ({self.chosen}) must not be above count ({self.count})"
        )
        _require(
            self.score != "softmax_of_chosen" or not (self.normalized or self.choice_bias),
            "softmax_of_chosen needs experts without choice_bias, and adds up to 1 without normalized",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What may differ between the layers of a decoder."""

    window: Size | None = None
    """Number of tokens that a token attends to, itself included; None means all."""
    rope: Rope | None = None
    """None: queries and keys are not rotated."""
    mlp: Literal["dense", "experts"] = "dense"
    """The feed-forward network: dense, of ModelConfig.mlp_width, or ModelConfig.experts."""

    def __post_init__(self) -> None:
        _check_fields(self, " of a layer kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Architecture of one decoder. Defaults: the llama layout (pre-RMSNorm, rotary positions, grouped queries, SwiGLU).

    Sources: RMSNorm arXiv:1910.07467, GQA arXiv:2305.13245, SwiGLU arXiv:2002.05202; post-norm,
    sinusoids and cross-attention arXiv:1706.03762; parallel residual arXiv:2204.06745; soft cap arXiv:2408.00118.
    """

    vocab_size: Size
    """Rows of the token embedding."""
    width: Size
    """Size of the residual stream."""
    n_layers: Size
    """Decoder blocks."""
    n_heads: Size
    """Query heads."""
    n_kv_heads: Size
    """Key and value heads; each serves n_heads / n_kv_heads query heads."""
    head_dim: Size
    """Size of one head."""
    mlp_width: Count
    """Hidden size of the dense feed-forward networks; 0 means none, as where all layers have experts."""
    context: Size
    """Maximum length in tokens of a sequence, and of an encoder's source."""
    norm: Norm = "rmsnorm"
    norm_eps: Positive = 1e-5
    """Added to the variance (layernorm) or mean square (rmsnorm)."""
    norm_bias: bool = False
    """Whether layernorm has a bias."""
    norm_weight: bool = True
    """Whether norms have weights; otherwise all are 1."""
    norm_offset: bool = False
    """Whether norms multiply by 1 + weight, computed in float32."""
    norm_position: NormPosition = "pre"
    """pre: x + f(norm(x)); post: norm(x + f(x)); output: x + norm(f(x)); sandwich: x + norm(f(norm(x)))."""
    embedding_norm: bool = False
    """Whether a norm follows the embedding."""
    final_norm: bool = True
    """Whether a norm precedes the head."""
    positions: Positions = "none"
    """Position vectors that are added to the token embeddings."""
    layer_kinds: tuple[LayerKind, ...] = (LayerKind(rope=Rope()),)
    """Kinds of layers, each used by at least one."""
    layer_types: tuple[Count, ...] = ()
    """Index in layer_kinds of each layer's kind; empty if there is only one kind."""
    activation: Activation = "silu"
    gated: bool = True
    """Whether the feed-forward is down(activation(gate(x)) * up(x)) instead of down(activation(up(x)))."""
    experts: Experts | None = None
    """Of the layers with LayerKind.mlp experts."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    out_projection: bool = True
    """Whether attention has an output projection."""
    qk_norm: QkNorm = "none"
    """RMSNorm over each query and key head (arXiv:2302.05442), or over all queries and over all keys of a token."""
    qk_norm_after_rope: bool = False
    """Whether that norm follows the rotation."""
    parallel_residual: bool = False
    """x + attention(norm(x)) + mlp(norm(x)), each with its own norm."""
    shared_norm: bool = False
    """Whether the two norms of a parallel residual have the same weights."""
    attention_scale: ScaleBy | Positive = "head_dim"
    """Factor of the attention scores; a name divides them by the square root of that size."""
    attention_soft_cap: Positive | None = None
    """Attention scores become cap * tanh(scores / cap)."""
    sinks: bool = False
    """A learned score of each head that takes part in the softmax, without a value (arXiv:2309.17453)."""
    query_scale: QueryScale | None = None
    residual_scale: Positive = 1.0
    """Factor of what attention and feed-forward add to the residual stream."""
    tied_head: bool = True
    """Whether the output projection is the token embedding."""
    embedding_scale: Positive = 1.0
    """Factor of the token embeddings."""
    logit_scale: Positive = 1.0
    """Factor of the logits, before the soft cap."""
    logit_soft_cap: Positive | None = None
    """Logits become cap * tanh(logits / cap)."""
    n_encoder_layers: Count = 0
    """Blocks of the encoder that each decoder block attends to; 0 means no encoder."""

    def __post_init__(self) -> None:
        _check_fields(self)
        self._check_combinations()

    @property
    def kv_elements_per_token(self) -> int:
        """KV cache elements per token, over all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim

    @property
    def head_norm_sizes(self) -> tuple[int, int]:
        """Numbers that the norm of queries and the norm of keys take together, unless qk_norm is none."""
        counts = (self.n_heads, self.n_kv_heads) if self.qk_norm == "width" else (1, 1)
        return counts[0] * self.head_dim, counts[1] * self.head_dim

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return tuple(self.layer_kinds[index] for index in self.layer_types) or self.layer_kinds * self.n_layers

    def layer_kind(self, layer: int) -> LayerKind:
        """The kind of the layer with this index."""
        return self.layer_kinds[self.layer_types[layer] if self.layer_types else 0]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return tuple(kind.window for kind in self.layers)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different rotations, in the order of layer_kinds."""
        return tuple(dict.fromkeys(kind.rope for kind in self.layer_kinds if kind.rope))

    def rotated_dim(self, rope: Rope | None) -> int:
        """Number of dimensions of each head that `rope` rotates."""
        if rope is None:
            return 0
        return self.head_dim if rope.dim is None else rope.dim

    @property
    def q_factor(self) -> float:
        """Factor of queries where attention divides scores by sqrt(head_dim), whatever attention_scale says."""
        if self.attention_scale == "head_dim":
            return 1.0
        by_width = self.attention_scale == "width"
        return float((self.head_dim / self.width) ** 0.5 if by_width else self.score_factor * self.head_dim**0.5)

    @property
    def score_factor(self) -> float:
        """Factor of the attention scores."""
        if isinstance(self.attention_scale, str):
            return float((self.head_dim if self.attention_scale == "head_dim" else self.width) ** -0.5)
        return self.attention_scale

    @property
    def has_norm_before(self) -> bool:
        """Whether a norm precedes attention and feed-forward."""
        return self.norm_position in ("pre", "sandwich")

    @property
    def has_norm_of_output(self) -> bool:
        """Whether a norm precedes the addition to the residual stream."""
        return self.norm_position in ("output", "sandwich")

    def _check_combinations(self) -> None:
        heads, kv_heads, head_dim = self.n_heads, self.n_kv_heads, self.head_dim
        _require(heads % kv_heads == 0, f"n_heads ({heads}) must be a multiple of n_kv_heads ({kv_heads})")
        for dim in map(self.rotated_dim, self.ropes):
            _require(
                dim % 2 == 0 and dim <= head_dim,
                f"a rope rotates pairs: its dim must be even and at most head_dim ({head_dim}), not {dim}",
            )
        for rope in self.ropes:
            _require(
                len(rope.long_factors) in (0, self.rotated_dim(rope) // 2),
                f"longrope needs {self.rotated_dim(rope) // 2} short_factors and long_factors, one for each pair of "
                f"rotated dimensions, not {len(rope.long_factors)}",
            )
        self._check_layer_types()
        self._check_norms()
        self._check_feed_forwards()
        _require(
            self.residual_scale == 1.0 or not self.has_norm_of_output,
            "a norm of outputs cancels the residual_scale: it must be 1, or the norm_position pre or post",
        )
        _require(self.parallel_residual or not self.shared_norm, "shared_norm needs parallel_residual")
        _require(
            self.out_projection or (heads * head_dim == self.width and not self.out_bias),
            f"without out_projection {heads} heads of {head_dim} must add up to the width ({self.width}), without bias",
        )
        _require(
            self.out_projection or (not self.has_norm_of_output and self.residual_scale == 1.0),
            "without out_projection the norm_position must be pre or post, and the residual_scale 1",
        )
        _require(
            not self.n_encoder_layers
            or not (self.parallel_residual or self.layer_types or self.layer_kinds[0].window is not None),
            "an encoder supports neither parallel_residual nor windows nor several layer_kinds",
        )
        _require(
            not self.n_encoder_layers or not (self.query_scale or self.attention_soft_cap or self.embedding_norm),
            "an encoder supports neither query_scale nor attention_soft_cap nor embedding_norm",
        )
        _require(
            not self.n_encoder_layers or not (self.experts or self.sinks), "an encoder supports no experts or sinks"
        )

    def _check_feed_forwards(self) -> None:
        experts, kinds = self.experts, {kind.mlp for kind in self.layer_kinds}
        _require(
            (experts is not None) == ("experts" in kinds),
            "experts are needed if and only if a layer kind has mlp experts",
        )
        _require("dense" in kinds or not self.mlp_width, "without dense layers mlp_width must be 0")
        has_dense = self.mlp_width > 0 or (experts is not None and experts.shared_width > 0)
        _require(has_dense or not self.mlp_bias, "mlp_bias needs a feed-forward (mlp_width above 0)")
        _require(
            not self.parallel_residual or (self.norm_position == "pre" and self.mlp_width > 0),
            "parallel_residual needs norm_position pre and a feed-forward",
        )
        _require(self.gated or self.activation != "swiglu_clamped", "activation swiglu_clamped needs gated")
        if experts:
            _require(not self.parallel_residual, "parallel_residual supports no experts")
            _require(self.activation != "xielu", "experts support no activation with parameters, such as xielu")
            _require(
                not (experts.shared_width and self.has_norm_of_output),
                f"experts with shared_width need norm_position pre or post, not {self.norm_position}",
            )

    def _check_norms(self) -> None:
        is_none = self.norm == "none"
        _require(
            not (is_none and (self.final_norm or self.embedding_norm or self.norm_position != "pre")),
            "final_norm, embedding_norm, and any norm_position but pre need a norm, not norm none",
        )
        _require(self.norm == "layernorm" or not self.norm_bias, f"norm_bias needs layernorm, not {self.norm}")
        _require(
            self.norm_weight or not (self.norm_bias or self.norm_offset), "norm_bias and norm_offset need norm_weight"
        )
        _require(self.qk_norm == "head" or not self.qk_norm_after_rope, "qk_norm_after_rope needs qk_norm head")

    def _check_layer_types(self) -> None:
        kinds, types = self.layer_kinds, self.layer_types
        _require(len(set(kinds)) == len(kinds) > 0, "layer_kinds must not be empty or name a kind twice")
        _require(len(kinds) <= MAX_LAYER_KINDS, f"layer_kinds may have at most {MAX_LAYER_KINDS} kinds")
        if not types:
            _require(
                len(kinds) == 1, f"layer_types must name the kind of each layer, since there are {len(kinds)} kinds"
            )
            return
        _require(
            len(types) == self.n_layers and set(types) == set(range(len(kinds))) and len(kinds) > 1,
            f"layer_types must have one index for each of the {self.n_layers} layers and use each of the {len(kinds)} "
            "layer_kinds; it must be empty if there is only one",
        )


Part = ModelConfig | LayerKind | Rope | QueryScale | Experts


def check_field(name: str, value: object, key: str, of: type[Part] = ModelConfig) -> None:
    """Checks a value for a field of a config, which comes from a file that calls it `key`. Raises ConfigError."""
    check_value(value, _annotations(of)[name], key)
