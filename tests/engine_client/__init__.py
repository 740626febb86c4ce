"""Tests of app/engine_client."""
