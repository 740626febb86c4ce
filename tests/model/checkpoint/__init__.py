"""Tests of model/checkpoint."""
