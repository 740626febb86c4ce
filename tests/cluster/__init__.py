"""Tests of app/cluster."""
