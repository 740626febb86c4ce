"""Memory of the engine: paged KV cache, encoder cache, and their sizes.

Main names: KVCache, EncoderCache, MemoryPlan.
Invariants: The plan is made before anything is allocated; a configuration that does not fit is refused with the
numbers.
"""
