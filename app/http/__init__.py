"""The HTTP server: connections, limits, deadlines, authentication, errors, server-sent events, request log."""
