"""Kernels against references in higher precision, on large shapes: what conform.py looks through.

Each file here has functions `check_*(device: str, tiny: bool)` that give, one after the other, a mapping for each thing
compared: `what`, `ok`, and if need be `value`, `unit`, `note`. One that raises counts as failed; the others go on.
"""
