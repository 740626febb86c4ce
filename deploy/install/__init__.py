"""Makes and completes the environment that make runs everything in: python -m deploy.install runtime|dev.

Main names: Installation runs the steps: environment, packages (by their hashes), torch (the build for this machine),
inkstream (this folder), and the native kernels at the same time. choose_torch() and uv_options() decide with what,
explain() says what to do when that fails. make calls it; docs/install.md is the how-to.
Invariants: Only the standard library, because nothing else is installed yet. A run that was interrupted at any point
leaves .venv/unfinished, and the next one begins anew. Only a complete environment has .venv/installed.
"""
