"""Kernels against references in higher precision: what `conform` checks on large shapes, and tests on small ones."""
