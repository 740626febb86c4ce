"""Everything that a GPU is needed for, in one run: `make gpu-check`."""
