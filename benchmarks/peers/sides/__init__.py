"""One file per side: a program that loads one model and measures on request. Runs in the peer's environment.

Nothing here may import what a peer's environment does not hold: the standard library, numpy, and the peer itself.
"""
