"""Reports of a run: progress, metrics, plots, model card, export."""
