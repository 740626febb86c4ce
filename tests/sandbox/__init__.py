"""Tests of app/sandbox."""
