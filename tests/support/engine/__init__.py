"""Helpers for tests of the engine in one process."""
