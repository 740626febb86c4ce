"""Tests of model/nn against other implementations."""
