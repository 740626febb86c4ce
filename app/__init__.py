"""The service: text in, streamed text out.

Main names: start.serve() checks the settings and starts an engine; main.create_app() wires settings, engines, service
and routes into an ASGI application; server.run() serves it with uvicorn.
Invariants: The API process never imports torch. Packages import only from layers below them, as
docs/architecture.md says.
"""
