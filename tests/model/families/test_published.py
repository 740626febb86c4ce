"""Configurations as vendors publish them: how many parameters, how much cache, which context fits, what is refused.

They were typed in from memory, since these machines reach no model hub, without factors of a longrope; that each one's
number of parameters is the published one confirms its sizes. Cache and contexts are as `check` computed them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.cli.check import context_bytes, describe_contexts
from model.checkpoint.model_summary import memory_lines
from model.config import ConfigError
from model.families.registry import MODEL_TYPES, read_config
from model.parameter_shapes import count_parameters
from tests.tools.families import with_contexts

_TEXT = Path(__file__).with_name("published.json").read_text()
PUBLISHED: dict[str, dict[str, dict[str, Any]]] = json.loads(_TEXT)


@pytest.mark.parametrize("name", PUBLISHED["read"])
def test_published_model_has_its_parameters_and_its_context_in_usual_memories(name: str) -> None:
    """Numbers of parameters are the vendors'; OPT's are without two rows of positions that no text reaches."""
    expected = PUBLISHED["read"][name]
    family, config = read_config(expected["config"])
    assert count_parameters(config) == expected["parameters"]
    assert 2 * config.kv_elements_per_token / 1024 == expected["kib_per_token"]
    assert describe_contexts(config, expected["parameters"]).startswith(expected["contexts"] + " of free memory")
    assert expected["config"]["model_type"] in (family.name, family.wrapper and family.wrapper.name)


@pytest.mark.parametrize(
    ("name", "cost"),
    [
        ("google/gemma-3-4b-pt", "136 KiB of cache a token (20 KiB beyond the windows), 2.645 GiB a full context"),
        ("google/gemma-3-1b-pt", "26 KiB of cache a token (4 KiB beyond the windows), 145.2 MiB a full context"),
        (
            "allenai/Olmo-3-1025-7B",
            "512 KiB of cache a token (128 KiB beyond the windows), 9.605 GiB a full context",
        ),
        ("mistralai/Mistral-7B-v0.1", "128 KiB of cache a token, 4 GiB a full context"),
        ("Qwen/Qwen3-8B", "144 KiB of cache a token, 5.625 GiB a full context"),
    ],
)
def test_windows_in_some_layers_are_counted_once(name: str, cost: str) -> None:
    _, config = read_config(PUBLISHED["read"][name]["config"])
    lines = dict(memory_lines(config, 1, context_bytes(config)))
    assert lines["bfloat16"].replace("KV cache", "cache").endswith(f" of weights, {cost}")


@pytest.mark.parametrize("name", PUBLISHED["refused"])
def test_published_model_of_another_kind_is_refused_by_what_it_needs(name: str) -> None:
    refused = PUBLISHED["refused"][name]
    with pytest.raises(ConfigError, match=refused["words"]) as caught:
        read_config(refused["config"])
    assert "\n" not in str(caught.value)


def test_cache_and_contexts_are_generated() -> None:
    assert with_contexts(_TEXT) == _TEXT, "run: python -m tests.tools.families"


def test_there_are_forty_models_of_most_families() -> None:
    types = {each["config"]["model_type"] for each in PUBLISHED["read"].values()}
    assert len(PUBLISHED["read"]) >= 40 and len(types) > len(MODEL_TYPES) / 2
