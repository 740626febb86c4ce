"""Tests of app/engine/cpu."""
