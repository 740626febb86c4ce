"""Tokenizes text off the event loop, and times tokenizers before they are trusted.

Main names: TextEncoder, TokenizerPool, TokenizerSandbox.
Invariants: No text and no tokenizer file can hold the event loop.
"""
