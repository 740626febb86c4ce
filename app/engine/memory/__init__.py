"""Memory of the engine: the plan of what it allocates, and errors of a device that lacks it.

Main names: MemoryPlan, CacheShape, lost_device().
Invariants: The plan is made before anything is allocated; a configuration that does not fit is refused with the
numbers.
"""
