"""Tests of model/families against transformers."""
