"""Tests of app/common."""
