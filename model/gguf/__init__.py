"""GGUF files: their metadata and tensors, their packed blocks, and the models that they describe.

Main names: GgufFile, read_blocks().
Invariants: nothing in a file is trusted or executed; memory and time are bounded by its size; packed matrices have the
numbers of the file, bit for bit.
"""
