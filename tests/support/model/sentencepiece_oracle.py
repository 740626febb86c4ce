"""SentencePiece's BPE, slow and simple: what a tokenizer made of its scores must agree with."""

from __future__ import annotations

from collections.abc import Mapping


def sentencepiece_ids(text: str, scores: Mapping[str, float], ids: Mapping[str, int]) -> list[int]:
    """Merges the neighbors whose common piece has the highest score, the first of equal ones; bytes for the rest."""
    pieces = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        known = [(scores[piece], -i) for i in range(len(pieces) - 1) if (piece := pieces[i] + pieces[i + 1]) in scores]
        if not known:
            break
        at = -max(known)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    whole = [[piece] if piece in ids else [f"<0x{byte:02X}>" for byte in piece.encode()] for piece in pieces]
    return [ids[piece] for parts in whole for piece in parts]
