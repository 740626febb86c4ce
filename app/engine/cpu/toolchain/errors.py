"""Why there are no native kernels. Pure."""

from __future__ import annotations


class Unusable(ValueError):
    """The native kernels are no use here, built or not; the message says why."""


class BuildError(ValueError):
    """The native kernels cannot be built; the message says why and what to change, in one line."""


class NoCompiler(BuildError):
    """There is no C++ compiler."""
