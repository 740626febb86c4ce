"""One program per engine that loads a model and measures on request, in the engine's own environment.

Modules here import only what every environment holds: the standard library, numpy, and the engine itself.
"""
