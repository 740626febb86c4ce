"""Cases of gpt_neo."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import FamilyCases

_SIZES: dict[str, Any] = {"num_layers": 2, "max_position_embeddings": 128}
_PAIR = [[["global", "local"], 1]]

FAMILIES = (
    FamilyCases(
        name="gpt_neo",
        minimal={**_SIZES, "hidden_size": 48, "num_heads": 4, "vocab_size": 99, "attention_types": _PAIR},
        shapes={
            "a": {**_SIZES, "hidden_size": 80, "num_heads": 4, "window_size": 17, "attention_types": _PAIR},
            "b": {**_SIZES, "hidden_size": 36, "num_heads": 3, "attention_types": [[["global"], 2]]}
            | {"intermediate_size": 50, "activation_function": "relu", "tie_word_embeddings": False},
            "c": {**_SIZES, "hidden_size": 48, "num_heads": 2, "window_size": 64, "num_layers": 3}
            | {"attention_types": [[["local"], 2], [["global"], 1]], "layer_norm_epsilon": 1e-3},
        },
        variants=(
            {"attention_types": None, "num_layers": 24},
            {"attention_layers": ["global", "local"], "intermediate_size": None, "window_size": 256},
            {"attention_types": [[["local"], 2]], "intermediate_size": 50, "window_size": 9},
            {"attention_types": [[["global"], 1], [["local"], 1]], "tie_word_embeddings": False},
        ),
        switches=(
            ("a", {"window_size": 18}),
            ("a", {"attention_layers": ["local", "global"]}),
            ("c", {"attention_layers": None, "attention_types": [[["global"], 3]]}),
            ("c", {"layer_norm_epsilon": 1e-5}),
        ),
        refused=(
            ({"attention_types": [[["global"], 1]]}, "^attention_types must name each of the 2 layers"),
            ({"attention_types": [[["global"], 10**12]]}, "^attention_types must name each of the 2 layers"),
            ({"attention_types": [[[], 10**12]] * 3}, "^attention_types must name each of the 2 layers"),
            ({"attention_types": [[["global"], "2"]]}, "^attention_types must name each of the 2 layers"),
            ({"attention_types": [["global", 2]]}, "^attention_types must name each of the 2 layers"),
            ({"attention_types": []}, "^attention_types must name each of the 2 layers"),
            ({"attention_types": 7}, "^attention_types must name each of the 2 layers"),
            ({"attention_layers": ["global", "sparse"]}, "^attention_layers must name each of the 2 layers, as global"),
            ({"attention_layers": ["global", ["local"]]}, "^attention_layers must name each"),
            ({"num_layers": 10**9}, "^1000000000 layers of several kinds are not supported"),
            ({"window_size": None}, "^window_size cannot be None"),
            ({"window_size": 0}, "^window_size cannot be 0"),
            ({"num_heads": 5}, r"^hidden_size \(48\) must be a multiple of num_heads \(5\)"),
        ),
        neutral={
            "attention_types": "what attention_layers, which transformers writes beside it, says layer by layer",
            "resid_dropout": "of training",
            "embed_dropout": "of training",
            "classifier_dropout": "of classifiers",
        },
        buffers=("transformer.h.0.attn.attention.bias", "h.11.attn.attention.masked_bias"),
        activation_key="activation_function",
    ),
)
