"""Checks of an engine before it serves: golden answers, finite logits, batch invariance.

Main names: check_golden(), check_finite_logits(), check_batch_invariance().
Invariants: An engine that fails a check does not serve: the start or the reload is refused with the reason.
"""
