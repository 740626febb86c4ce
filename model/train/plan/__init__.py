"""Estimates of a run before it starts: dataset size, time, memory, disk."""
