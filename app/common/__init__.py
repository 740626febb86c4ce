"""Used by the API process and the engine process alike: types, errors, IPC, settings, logs.

Main names: Request, SamplingParams, SampledEvent, StepReport, Settings, EngineError and its subclasses.
Invariants: Imports neither torch nor a web framework. What crosses the pipe is a frozen msgspec struct.
"""
