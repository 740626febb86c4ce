"""Endpoints: what all routes share, and the routes for tokens, scores, health, metrics and static pages.

Main names: RequestHandle (one admitted request), Delivery (its frames), CompletionFields (fields that all completion
APIs share), ResumeStore, Metrics.
Invariants: Every admitted request is counted once and always released. Every error has the format of
app/http/errors.py.
"""
