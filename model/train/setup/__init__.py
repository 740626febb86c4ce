"""From flags to what a run begins with: options, dataset, initial weights."""
