"""Weights rounded to eight bits."""
