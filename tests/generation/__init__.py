"""Tests of app/generation."""
