"""Used by all parts of training: console messages, interrupts, threads, output directory, sample texts.

Main names: StopRequest, Sample, map_shares().
Invariants: Imports no other part of model.train.
"""
