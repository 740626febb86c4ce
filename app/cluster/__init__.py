"""Several services behind one gateway: retries, failover of streams, broadcasts. Ray Serve runs it.

Main names: Gateway, RetryingRequest, FailoverStream.
Invariants: A stream that moves to another replica continues at the next character, or ends with an error; it never
differs from what the client has.
"""
