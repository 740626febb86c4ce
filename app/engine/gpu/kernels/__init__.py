"""Operations of a step on a GPU: their interface and their layouts.

Main names: Kernels (the interface), Launch, the sampling state and its layout.
Invariants: No operation reads a value on the host, so that a CUDA graph can capture all of them.
"""
