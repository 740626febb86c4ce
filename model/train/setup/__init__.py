"""Setup of a run: options, dataset, initial weights, estimates before the start.

Main names: Flag, Dataset, load_base(), forecast().
Invariants: Wrong input is refused before torch is imported where possible, and before any training in any case.
"""
