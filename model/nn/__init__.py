"""The network: layers, attention, positions, blocks, and a readable reference."""
