"""Helper processes with limits on time and memory, killed when they exceed them."""
