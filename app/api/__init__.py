"""Endpoints: what all routes share, and the routes for tokens, scores, health, metrics and static pages."""
