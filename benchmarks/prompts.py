"""Pseudo-prose prompts. Deterministic; no two share a prefix, so that the prefix cache does not improve the figures."""

from __future__ import annotations

from random import Random

_PROSE = """
again air all and apple away ball bear bed big bird blue boat book box bread bright brother cake came cat
chair child cold day dog door down fast field find fish flower found friend game garden gave girl good grass
green had hand happy hat heard hill home horse house kind lake leaf light little long looked lost made man
moon morning mother near new night old on open out over park played rain ran red river road room round said
sang saw sea shoe sing sky slow small smile snow soft song star stone story sun table tall then there thing
tree under walk warm was water wind wood yellow
"""
_WORDS = _PROSE.split()
_SENTENCE = (6, 12)
_SEED_STEP = 10_000
"""Requests of a run before its prompts start like those of a run with the next seed."""
_STRIDE = 7_919
"""A prime that does not divide the number of openings: neighbors start with different words, and no two start alike."""


def pseudo_prose(*, index: int, words: int, seed: int) -> str:
    """Prompt number `index`: exactly `words` words in sentences. Its first three words are unique."""
    random = Random(f"{seed}/{index}")
    chosen = _opening(index + seed * _SEED_STEP)[:words]
    chosen += random.choices(_WORDS, k=words - len(chosen))
    sentences: list[str] = []
    while chosen:
        length = random.randint(*_SENTENCE)
        sentences.append(" ".join(chosen[:length]).capitalize() + ".")
        chosen = chosen[length:]
    return " ".join(sentences)


def _opening(index: int) -> list[str]:
    """Three words unique to this index: the scrambled index as three digits to the base of the list's length."""
    base = len(_WORDS)
    scrambled = index * _STRIDE % base**3
    return [_WORDS[scrambled % base], _WORDS[scrambled // base % base], _WORDS[scrambled // base**2]]
