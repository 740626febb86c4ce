"""Test helpers."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository root."""
