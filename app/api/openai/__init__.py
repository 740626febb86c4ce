"""The endpoints under /v1 that speak OpenAI's protocol: completions, chat, models."""
