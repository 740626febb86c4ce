"""Builds the native kernels, caches them, and selects a backend; most of it needs Python alone."""
