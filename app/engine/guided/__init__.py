"""Guided decoding in the engine: grammar states, token masks, compilation beside the steps."""
