"""Weights quantized to integers or fp8, and products with them in torch.

Main names: quantize(), round_weights(), dequantized_product(), fp8_product().
Invariants: integers are weight-only and symmetric: every backend computes with the same rounded numbers.
"""
