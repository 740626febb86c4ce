"""The service's own completion endpoint, `POST /complete`: schemas, routes, resumable event streams."""
