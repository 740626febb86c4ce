"""The version of a model: what identifies the numbers that it computes with."""

from __future__ import annotations

from msgspec import Struct

_SHORT_DIGEST = 16


class Version(Struct, frozen=True, array_like=True):
    """Digests of the weights and of the adapters on top of them, in the order in which they apply.

    Two versions are equal exactly if their keys are: digests are hexadecimal, so they contain no separator.
    """

    weights: str
    """SHA-256 of the weights directory."""
    adapters: tuple[str, ...] = ()
    """SHA-256 of each adapter."""

    @property
    def key(self) -> str:
        """The version as one string, in receipts, headers and cache keys: the digests, joined by "+"."""
        return "+".join((self.weights, *self.adapters))

    @property
    def short_key(self) -> str:
        """The first 16 characters of each digest, joined by "+"; for logs and fingerprints."""
        return "+".join(digest[:_SHORT_DIGEST] for digest in (self.weights, *self.adapters))
