"""Runs the steps that the scheduler plans: engine, runner, executor in torch, isolation of failed requests.

Main names: Engine, StepRunner, Runner, FaultIsolation, TorchExecutor.
Invariants: Only the request at fault fails. Computing a chunk again gives the same result and changes nothing else.
"""
