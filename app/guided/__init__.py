"""Grammars of requests, compiled and checked in a sandboxed process.

Main names: grammar_from(), GrammarValidator.
Invariants: A grammar that is invalid or too complex is refused before it reaches the engine.
"""
