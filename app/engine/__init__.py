"""The engine process: starts a backend and runs the worker loop; `python -m app.engine FD`.

Main names: startup.build_engine(), worker_loop.run(), watchdog.HangTrace, backends.CppBackend.
Invariants: One process, one model. It exits when the pipe to the API process closes. A step's results are reported in
one message.
"""
