"""The service: text in, streamed text out."""

VERSION = "0.1.0"
