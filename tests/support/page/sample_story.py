"""Sample prose for screenshots, with token probabilities and alternatives. Written for these tests."""

import math
import re

BEGINNING = (
    "The lighthouse had been dark for three winters when Mara came down the cliff path with her father's keys in her"
    " pocket. Nobody in the village had asked her to come, and nobody, she thought, would ask her to stay."
)
MIDDLE = (
    "\n\nThe iron door had swollen in its frame. She set her shoulder to it, once, twice, and at the third blow it gave"
    " way with a groan, like something woken too early. Inside, the air smelled of paraffin and wet rope. Forty years"
    " of logbooks stood along the wall in her father's careful hand, and on the last of them, folded in four, lay a"
    " letter with her name on it."
)
ENDS = (
    " She did not open it at once. She carried it up the hundred and twelve steps, past the cold lamp, out to the"
    " gallery, where the wind would take from her whatever it said.",
    " The ink was still wet. She held the page to the window, and then, very slowly, she turned to look at the stairs.",
    " It was not his writing. It was her own, large and round, as she had written when she was nine, and it began:"
    " When you find this, light the lamp.",
)
MODEL = {"id": "harbour-124m", "weights_version": "sha256:7c41e09b52aa", "max_model_len": 2048, "n_vocab": 32_768}
OTHERS = {
    " letter": (" map", " key", " photograph", " note"),
    " dark": (" empty", " closed", " silent", " dead"),
    " groan": (" sigh", " crack", " shriek", " cry"),
    " paraffin": (" salt", " dust", " oil", " tar"),
    " shoulder": (" hand", " lamp", " lips", " foot"),
}
USUAL = (" the", " a", " and", " her")
LIKELY = {"the", "of", "to", "her", "it", "in", "and", "a", "had", "was", ",", ".", "she", "The", "She", "'s", "that"}


def tokens(text):
    """The server's token objects of a text, each with its five most probable alternatives."""
    return [_token(index, piece) for index, piece in enumerate(re.findall(r"\s*\w+|\s*[^\w\s]", text))]


def placed(text):
    """What POST /tokenize answers for it."""
    pieces, end = [], 0
    for token in tokens(text):
        start, end = end, end + len(token["text"])
        pieces.append({"id": token["id"], "text": token["text"], "bytes": token["bytes"], "start": start, "end": end})
    ids = [piece["id"] for piece in pieces]
    return {"tokens": ids, "pieces": pieces, "count": len(ids), "max_model_len": 2048}


def scored(text):
    """What POST /score answers for it: the first token has no probability."""
    first, *others = tokens(text)
    return {"scores": [{"tokens": [{**first, "logprob": None, "top": None}, *others]}]}


def _token(index, text):
    probability = _probability(index, text)
    others = [other for other in OTHERS.get(text, USUAL) if other != text]
    rest = [(1 - probability) * share for share in (0.5, 0.22, 0.14, 0.08)]
    top = [(text, probability), *zip(others, rest, strict=False)]
    entries = [_entry(word, p) for word, p in sorted(top, key=lambda pair: -pair[1])]
    return {**_entry(text, probability), "top": entries}


def _probability(index, text):
    """Common words are likely, long ones a surprise, and no two alike."""
    wobble = (index * 37 % 23) / 23
    if text in OTHERS:
        return 0.08 + 0.2 * wobble
    if text.strip() in LIKELY:
        return 0.5 + 0.48 * wobble
    return max(0.02, 0.75 * wobble - 0.04 * len(text.strip()) + 0.2)


def _entry(text, probability):
    number = int.from_bytes(text.encode()) % 32_768
    return {"id": number, "text": text, "bytes": list(text.encode()), "logprob": math.log(probability)}


def run(*texts, seed=20261122, reason="length"):
    """The events of a run that writes these texts as its continuations, in turn."""
    written = [tokens(text) for text in texts]
    count = sum(len(one) for one in written)
    settings = {"temperature": 0.8, "top_p": 0.95, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    start = {"id": "r", "model": MODEL["id"], "weights_version": MODEL["weights_version"], "settings": settings}
    yield "start", {**start, "seed": seed, "prompt_tokens": 44, "cached_tokens": 0}
    for position in range(max(len(one) for one in written)):
        for index, one in enumerate(written):
            if position < len(one):
                yield "token", {"index": index, "text": one[position]["text"], "tokens": [one[position]]}
    usage = {"prompt_tokens": 44, "completion_tokens": count, "total_tokens": 44 + count}
    choices = [{"index": i, "finish_reason": reason, "stop_reason": None} for i in range(len(texts))]
    timings = {
        "queue_ms": 0.3,
        "prefill_ms": 11.2,
        "first_token_ms": 14.9,
        "decode_ms": 690,
        "tokens_per_second": 141.6,
    }
    receipt = {
        "weights_version": start["weights_version"],
        "seed": seed,
        "settings": settings,
        "prompt_sha256": "5e" * 32,
        "numerics": "native-avx2-bfloat16",
    }
    yield "done", {"choices": choices, "usage": usage, "timings": timings, "receipt": {**receipt, "version": "0.1.0"}}
