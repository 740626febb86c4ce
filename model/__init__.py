"""The network and its files; independent of the service.

Main names: ModelConfig, preset(), choose_device().
Invariants: Nothing here imports from app.
"""
