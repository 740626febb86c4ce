"""The engine process: starts a backend and runs the loop of steps."""
