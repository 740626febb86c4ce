"""The API process's side of the engines: pool, replicas, router, fair queue, crash recovery.

Main names: EnginePool, Replica, EngineSlots, RequestQueue, OpenSequences, Supervisor.
Invariants: A client sees no engine crash: running requests continue with the same tokens, and only a request that
causes crashes fails.
"""
