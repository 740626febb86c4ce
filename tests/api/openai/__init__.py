"""Tests of the endpoints that follow OpenAI's API."""
