"""Helper processes with limits on time and memory, killed when they exceed them.

Main names: Sandbox, SandboxPool.
Invariants: Untrusted work (templates, grammars, regular expressions) never runs in the API process.
"""
