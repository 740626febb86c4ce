"""Data of a run: sources, tokenizer, token cache, examples, shuffling, batches.

Main names: Sources, Corpus, Dataset, Batch.
Invariants: The data of a step is a pure function of (seed, step).
"""
