"""The API process's side of the engines: pool, router, fair queue, token streams, crash recovery."""
