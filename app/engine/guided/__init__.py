"""Guided decoding in the engine: grammar states, token masks, background compilation.

Main names: GrammarTracker, GrammarMasks, GrammarCompileQueue, GrammarWorkers.
Invariants: No grammar delays a step: masks have a time budget, and the step skips a row whose mask is late. Work is
charged to the request.
"""
