"""Tests of app/tokenization."""
