"""What one training step does: loss, gradients, optimizer, schedule, averaging, evaluation, several processes.

Main names: Trainer, Objective, Schedule.
Invariants: Hand-written gradients match autograd's. With several ranks, every rank takes the same step or none does.
"""
