"""Grammars of requests, compiled and checked in a sandboxed process."""
