"""Training speed against plain PyTorch and transformers.Trainer: `python -m benchmarks.train`."""
