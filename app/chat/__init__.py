"""Chat templates of the weights, rendered in a sandboxed process.

Main names: ChatTemplate.
Invariants: Templates are untrusted: Jinja is imported in the worker process alone, under limits on time and memory.
"""
