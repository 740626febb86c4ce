"""Guided decoding in the engine: grammar states, token masks, background compilation.

Main names: GrammarTracker, GrammarCompileQueue, GrammarWorkers.
Invariants: No grammar holds up a step: masks have a time budget, and a row whose mask is late sits the step out. Work
is charged to the request.
"""
