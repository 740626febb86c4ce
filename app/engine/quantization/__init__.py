"""Weights that are stored in fewer bits, packed or in fp8, and products with them in torch.

Main names: packed_product(), fp8_product().
Invariants: packed matrices are weight-only: every backend computes with the same rounded numbers.
"""
