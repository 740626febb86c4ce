"""What may go wrong with a build. Pure."""

from __future__ import annotations


class BuildError(ValueError):
    """The native kernels cannot be built; the message says why and what to change, in one line."""


class NoCompiler(BuildError):
    """There is no C++ compiler."""
