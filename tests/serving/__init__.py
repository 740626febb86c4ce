"""Tests of app/serving and of the whole service's processes."""
