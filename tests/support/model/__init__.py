"""Models, weights directories and tokenizers made for tests."""
