"""Tests of make gpu-check."""
