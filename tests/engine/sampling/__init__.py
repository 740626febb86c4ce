"""Tests of app/engine/sampling."""
