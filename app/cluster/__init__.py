"""Several services behind one gateway: retries, failover of streams, broadcasts."""
