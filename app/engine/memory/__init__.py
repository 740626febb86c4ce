"""Memory of the engine: paged KV cache, encoder cache, and how large they may be."""
