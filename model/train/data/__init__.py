"""Texts and conversations for training: sources, examples, token cache, shuffling, batches."""
