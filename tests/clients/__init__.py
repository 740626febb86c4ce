"""Real clients of the completions API, run against the service: make clients."""
