"""Plans steps: waiting queue, paged blocks, prefix cache, steps in flight."""
