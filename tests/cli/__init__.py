"""Tests of app/cli and app/__main__.py."""
