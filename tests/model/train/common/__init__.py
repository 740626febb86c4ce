"""Tests of model/train/common."""
