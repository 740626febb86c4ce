"""Speculative decoding that changes no bit: draft tokens, verify them as rows of the step, accept the right ones.

Main names: Speculation, Proposer, Proposal, LookupProposer, NgramIndex, StepCosts.
Invariants: A draft changes no token, and costs nothing where it does not pay. What one tenant wrote gives another no
draft. docs/speculation.md has the argument and the figures.
"""
