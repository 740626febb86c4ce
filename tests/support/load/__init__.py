"""Concurrent clients and load generators."""
