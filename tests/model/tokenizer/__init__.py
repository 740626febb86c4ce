"""Tests of model/tokenizer."""
