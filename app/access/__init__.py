"""Who may use the service and how much: API keys, tenants, rate limits, fair turns.

Main names: ApiKeys, Tenant, RateLimiter and its Reservation, WorkerTurns.
Invariants: Keys are stored as hashes. A reservation is settled exactly once. Time is an argument, so that tests need no
clock.
"""
