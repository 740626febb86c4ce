"""The network and its files; independent of the service.

Main names: ModelConfig, WeightFormat, preset(), choose_device().
Invariants: Nothing here imports from app.
"""
