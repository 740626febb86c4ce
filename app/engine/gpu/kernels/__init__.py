"""Operations of a step on a GPU: their interface and their layouts.

Main names: Kernels (the interface), Launch, SamplingTable, SampleOut.
Invariants: No operation reads a value on the host, so that a CUDA graph can capture all of them.
"""
