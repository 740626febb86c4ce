"""Helpers for tests of GPU code, also without a GPU."""
