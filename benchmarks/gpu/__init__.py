"""All measurements that need a GPU, in one run: `make gpu-check`."""
