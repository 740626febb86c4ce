"""Comparison with other engines and servers on the same machine in the same run: `python -m benchmarks.peers`."""
