"""Reports of a run: progress, metrics, plots, model card, export.

Main names: MetricsLog, Report, write_result().
Invariants: Reports never end a run: what cannot be written is reported and the training goes on.
"""
