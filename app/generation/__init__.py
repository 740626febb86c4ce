"""From a request to prompt token ids, and from tokens to events with text."""
