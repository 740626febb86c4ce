"""Texts and conversations for training: sources, examples, token cache, shuffling, batches.

Main names: Corpus, TokenCache, Batch.
Invariants: The data of a step is a pure function of (seed, step).
"""
