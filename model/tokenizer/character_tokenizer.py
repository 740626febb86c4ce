"""tokenizer.json of a model whose tokens are single characters."""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers


def character_tokenizer(ids: Mapping[str, int]) -> bytes:
    """The file's content. ids: of each character. Characters without an id are dropped from texts."""
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = {as_bytes.pre_tokenize_str(character)[0][0]: number for character, number in ids.items()}
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str(pretty=True).encode()
