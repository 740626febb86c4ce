"""An adversarial test suite that treats the service as a black box; docs/security-testing.md describes it.

Nothing here imports the service, its model code, or the other tests' helpers: a shared helper would share a mistake.
"""
