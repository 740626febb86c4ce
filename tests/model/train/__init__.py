"""Tests of model/train: whole runs."""
