"""A weights directory: safetensors checks, tensor index, manifest, golden answers."""
