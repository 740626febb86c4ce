"""Tests of app/chat."""
