"""The service's own completion endpoint, POST /complete: schemas, routes, resumable event streams.

Main names: routes.router, CompleteRequest, ResumableStream.
Invariants: A reconnecting client gets the same events with the same ids, byte for byte, as long as the stream is kept.
"""
