"""Runs the steps that the scheduler plans: engine, runner, warm-up, isolation of failed requests."""
