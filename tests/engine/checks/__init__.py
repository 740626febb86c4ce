"""Tests of app/engine/checks."""
