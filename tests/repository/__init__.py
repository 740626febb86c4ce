"""Tests of the repository itself: docs, import rules, installation, deployment files."""
