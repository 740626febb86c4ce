"""Tests of model/train/step."""
