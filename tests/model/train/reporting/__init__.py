"""Tests of model/train/reporting."""
