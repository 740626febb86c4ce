"""Tests of benchmarks: that each one runs, and what its pure parts compute."""
