"""The engine process: starts a backend and runs the loop of steps; `python -m app.engine FD`.

Main names: startup.assemble(), worker_loop.run(), backends.choose_way().
Invariants: One process, one model. It exits when the pipe to the API process closes. A step's results are reported in
one message.
"""
