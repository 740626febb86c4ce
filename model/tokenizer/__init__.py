"""Text to token ids and back: tokenizer files, token bytes, spans, special tokens.

Main names: Tokenizer, Pieces, Spans.
Invariants: Every token has exact bytes; decoding what was encoded gives the text back wherever the tokenizer loses
nothing.
"""
