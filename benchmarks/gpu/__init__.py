"""All measurements and checks that need a GPU, in one run: `make gpu-check`."""
