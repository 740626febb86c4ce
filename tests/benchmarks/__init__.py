"""Tests of benchmarks: that each runs, and what its pure parts compute."""
