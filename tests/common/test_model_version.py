"""The version of a model, as a key and over the pipe."""

from __future__ import annotations

from itertools import permutations

import msgspec

from app.common.model_version import Version


def test_key_without_adapters_is_the_digest_of_the_weights() -> None:
    assert Version("d" * 64).key == "d" * 64
    assert Version("0123456789abcdef" * 4).short_key == "0123456789abcdef"


def test_keys_are_equal_only_if_weights_and_adapters_are() -> None:
    adapters = [order for count in range(3) for order in permutations(("a" * 64, "b" * 64, "ab" * 32), count)]
    versions = [Version(weights, each) for weights in ("a" * 64, "c" * 64) for each in adapters]
    assert len({version.key for version in versions}) == len({version.short_key for version in versions})
    assert len({version.key for version in versions}) == len(set(versions)) == 2 * 10


def test_version_survives_the_pipe() -> None:
    version = Version("w", ("a", "b"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(version), type=Version) == version
