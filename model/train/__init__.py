"""The training script, `python -m model.train`.

Main names: Run, Loop.
Invariants: Interrupted and resumed runs give the same weights as uninterrupted ones. Ctrl+C saves.
"""
