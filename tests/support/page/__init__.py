"""Helpers for tests in a browser."""
