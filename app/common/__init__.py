"""Used by the API process and the engine process alike: types, errors, IPC, settings, logs, stored weights.

Main names: Request, SamplingParams, SampledEvent, StepReport, Settings, WeightsStore, EngineError and its subclasses.
Invariants: Imports neither torch nor a web framework. What crosses the pipe is a frozen msgspec struct.
"""
