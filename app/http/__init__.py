"""The HTTP server: connections, limits, deadlines, authentication, errors, server-sent events, request log.

Main names: HttpProtocol, ResponseCycle, ConnectionLimits, AuthMiddleware, ApiError, ResponseModel, EventStreamResponse.
Invariants: One request gets one answer. Every byte that a client may send or leave unread is bounded in size and time.
"""
