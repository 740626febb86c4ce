"""Helpers for tests of GPU code that also run without a GPU."""
