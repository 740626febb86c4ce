"""The network: layers, attention, positions, blocks, and a readable reference.

Main names: Decoder, Block, Linear, Interpreter, generate().
Invariants: reference.generate() is the oracle: every backend must draw its tokens.
"""
