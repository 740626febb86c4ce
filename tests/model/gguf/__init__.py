"""Tests of model/gguf against the gguf package."""
