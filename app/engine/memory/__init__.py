"""Memory of the engine: the plan of what it allocates, cache groups, and errors of a device that lacks it.

Main names: MemoryPlan, CacheShape, CacheGroup, lost_device().
Invariants: The plan is made before anything is allocated; a configuration that does not fit is refused with the
numbers.
"""
