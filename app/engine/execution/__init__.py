"""Runs the steps that the scheduler plans: engine, runner, warm-up, isolation of failed requests.

Main names: Engine, Runner, FaultIsolation.
Invariants: Only the request at fault fails. Computing a chunk again gives the same result and changes nothing else.
"""
