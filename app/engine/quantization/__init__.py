"""Weights quantized to eight bits.

Main names: quantize(), round_weights().
Invariants: Weight-only and symmetric: every backend computes with the same rounded numbers.
"""
