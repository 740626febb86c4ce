"""Tests of app/engine/scheduling, by simulation."""
