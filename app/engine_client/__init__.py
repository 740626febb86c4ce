"""The API process's side of the engines: pool, router, fair queue, token streams, crash recovery.

Main names: EnginePool, EngineClient, FairQueue, TokenStream, Supervisor.
Invariants: A client sees no engine crash: running requests continue with the same tokens, and only a request that
causes crashes fails.
"""
