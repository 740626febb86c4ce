"""Plans steps and commits them: waiting queue, paged blocks, prefix cache, steps in flight.

Main names: Scheduler, StepLimits, BatchPlan, BlockAllocator, BlockPool.
Invariants: Pure, i.e. no torch, no clock, no I/O. free + cached + active blocks = total, and every admitted sequence
finishes.
"""
