"""Weights quantized to eight bits, and products with them in torch.

Main names: quantize(), round_weights(), dequantized_product(), fp8_product().
Invariants: int8 is weight-only and symmetric: every backend computes with the same rounded numbers.
"""
