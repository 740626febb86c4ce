"""The training script, `python -m model.train`."""
