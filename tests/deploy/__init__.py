"""Tests of deploy/: what make's installation decides."""
