"""Setup of a run: options, dataset, initial weights."""
