"""Reports of a run: console, progress, log, plot, samples, model card.

Main names: Report, MetricsLog, model_card().
Invariants: Reports never end a run: what cannot be written is reported and the training goes on.
"""
