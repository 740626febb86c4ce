"""Tests, in folders that mirror the packages; tests/support has their helpers."""
