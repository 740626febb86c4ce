"""Guided decoding in the engine: grammar states, token masks, background compilation."""
