"""Tests of the comparison with other servers."""
