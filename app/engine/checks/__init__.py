"""Checks of an engine before it serves: golden answers, finite logits, batch invariance.

Main names: prove(), prove_finite(), prove_rows().
Invariants: An engine that fails a check does not serve: the start or the reload is refused with the reason.
"""
