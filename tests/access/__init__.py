"""Tests of app/access."""
