"""Helpers that speak or check HTTP byte by byte."""
