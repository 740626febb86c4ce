"""Tests of model/train/data."""
