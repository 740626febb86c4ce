"""Kernels against references in higher precision, on large shapes: the checks that conform.py runs.

Modules here have functions `check_*(device: str, tiny: bool)`. They yield a mapping for each comparison: `what`, `ok`,
and optionally `value`, `unit`, `note`. A check that raises has failed; the others go on.
"""
