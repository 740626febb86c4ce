"""The CUDA backend: decoder, runner, graphs, resident batch."""
