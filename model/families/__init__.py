"""Hugging Face layouts of models: their configurations and tensor names."""
