"""Checks of a running engine: golden answers, batch invariance, watchdog."""
