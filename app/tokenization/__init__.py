"""Tokenizes text off the event loop, and times tokenizers before they are trusted."""
