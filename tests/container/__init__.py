"""Tests of docs/deploy.md on real containers: make container."""
