"""Kernels against references in higher precision, on large shapes: the checks that conform.py runs.

Modules here have functions `check_*(device: str, tiny: bool)`. They yield a finding for each comparison. A check that
raises has failed; the others go on.
"""
