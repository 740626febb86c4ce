"""Chat templates of the weights, rendered in a sandboxed process."""
