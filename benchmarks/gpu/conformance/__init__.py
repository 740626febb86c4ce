"""Kernels against references in higher precision, on large shapes: the checks that conform.py runs.

Each file here has functions `check_*(device: str, tiny: bool)` that give, one after the other, a mapping for each thing
compared: `what`, `ok`, and if need be `value`, `unit`, `note`. One that raises counts as failed; the others go on.
"""
