"""Tells how a run goes and what came of it: progress, metrics, plots, model card, export."""
