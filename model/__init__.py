"""The network and its files; independent of the service."""
