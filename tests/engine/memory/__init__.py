"""Tests of app/engine/memory."""
