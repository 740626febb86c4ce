"""A weights directory: safetensors checks, tensor index, manifest, golden answers.

Main names: find_weights(), Checkpoint, load(), Golden, check_manifest().
Invariants: Files are untrusted: headers are checked before any tensor is read, and a directory is read whole or
refused.
"""
