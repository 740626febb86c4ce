"""Text to token ids and back: tokenizer files, token bytes, spans, special tokens."""
