"""The endpoints under /v1 that speak OpenAI's protocol: completions and chat.

Main names: routes.router, CompletionsRequest, ChatRequest, Responder.
Invariants: Unmodified OpenAI clients work. Fields that inkstream cannot honor are refused, never ignored in silence.
"""
