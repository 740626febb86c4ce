"""Hugging Face layouts of models: their configurations and tensor names.

Main names: FamilySpec, read_config(), family_of().
Invariants: A config.json field that changes the computation is understood or refused, never ignored.
"""
