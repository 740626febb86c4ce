"""Text to token ids and token ids to bytes, from a Hugging Face tokenizer.json and the files next to it.

`bytes_of[id]` are a token's exact bytes; only a detokenizer that sees the whole stream can decode them to characters.
Special tokens have no bytes: they control the model and are never shown.

tokenizer.json is validated before the tokenizers library reads it. The library trusts the file: for an id of two
billion it allocates a table of that size, and the process is killed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import cached_property
from itertools import chain
from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from model.files import one_line, read_bytes
from model.tokenizer.infill import INFILL_NAMES
from model.tokenizer.regexes import Unproven, find_unproven
from model.tokenizer.size_limits import (
    LARGEST_ID,
    LONGEST_PIECE,
    MAX_ENTRIES,
    Processor,
    TextStep,
    check_processors,
    check_steps,
)
from model.tokenizer.text_parts import part_tokenizer
from model.tokenizer.token_bytes import composes_text, keeps_text, piece_format
from model.tokenizer.token_spans import (
    CompactSpans,
    Spans,
    close_gaps,
    encode_in_pieces,
    run_to_completion,
    spans_of,
    untrimmed_processor,
)
from model.tokenizer.tokenizer_classes import TokenizerFacts, names_with_defaults, with_settings
from model.tokenizer.tokenizer_settings import TokenizerSettings, read_settings
from model.weights_version import Directory, File

MAX_BYTES = 64 << 20


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}
    merges: list[msgspec.Raw] | None = None


class _Added(msgspec.Struct):
    id: int
    content: str = ""


class _File(msgspec.Struct):
    """The fields validated here; msgspec skips all others without allocating memory."""

    model: _Model
    added_tokens: list[_Added] | None = None
    normalizer: TextStep | None = None
    pre_tokenizer: TextStep | None = None
    post_processor: Processor | None = None
    decoder: TextStep | None = None


def read_tokenizer_json(path: File) -> str:
    """Content of a tokenizer.json, after checks of its size, ids and steps. Raises ValueError naming the file."""
    content = read_bytes(path, MAX_BYTES)
    try:
        file = msgspec.json.decode(content, type=_File)
        text = content.decode()
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a tokenizer ({one_line(str(error))})") from None
    vocab, added = file.model.vocab, file.added_tokens or ()
    if (entries := len(vocab) + len(file.model.merges or ()) + len(added)) > MAX_ENTRIES:
        raise ValueError(f"{path}: has {entries} tokens and merges; at most {MAX_ENTRIES} are allowed")
    ids = [*(vocab.values() if isinstance(vocab, dict) else ()), *(token.id for token in added)]
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < LARGEST_ID:
            raise ValueError(f"{path}: a token has id {token}, and ids must be from 0 to {LARGEST_ID - 1}")
    pieces = vocab if isinstance(vocab, dict) else (piece for piece, _ in vocab)
    longest = max(map(len, chain(pieces, (token.content for token in added))), default=0)
    if longest > LONGEST_PIECE:
        raise ValueError(f"{path}: a token has {longest} characters; at most {LONGEST_PIECE} are allowed")
    try:
        for name in ("normalizer", "pre_tokenizer", "decoder"):
            check_steps(name, getattr(file, name))
        check_processors(file.post_processor)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return text


class _RawModel(msgspec.Struct):
    merges: msgspec.Raw = msgspec.Raw()
    """Only BPE has them."""


class _RawFile(msgspec.Struct):
    model: _RawModel
    pre_tokenizer: msgspec.Raw = msgspec.Raw()
    decoder: msgspec.Raw = msgspec.Raw()


def read_names(directory: Directory) -> dict[str, str]:
    """Special tokens ("bos_token", ... -> text) that transformers gives a chat template. Raises CheckpointError.

    Those of the files next to a tokenizer.json, which may be absent, and of the class that they choose. Roles without a
    token are omitted.
    """
    settings = read_settings(directory)

    def facts() -> TokenizerFacts:
        file = msgspec.json.decode(read_bytes(directory / "tokenizer.json", MAX_BYTES), type=_RawFile)
        steps = bytes(file.pre_tokenizer) + bytes(file.decoder)
        return TokenizerFacts(is_bpe=bool(bytes(file.model.merges)), is_bytewise=b"ByteLevel" in steps)

    try:
        return names_with_defaults(settings, facts)
    except ValueError:  # of a tokenizer that does not load, which its own error says
        return settings.names


_PROBE = "a \ue000 \U0010ffff"
"""A letter, and characters that no vocabulary has: a tokenizer that encodes this encodes everything."""


def check_ids(rust: RustTokenizer) -> None:
    """Raises ValueError if the vocabulary is empty or has duplicate ids."""
    ids = rust.get_vocab(with_added_tokens=False).values()
    if len(set(ids)) < len(ids):
        raise ValueError("two tokens have the same id, and each needs its own")
    if not rust.get_vocab(with_added_tokens=True):
        raise ValueError("the vocabulary is empty")


def unknown_token(model: dict[str, Any]) -> str | None:
    """The token for text that no other token covers."""
    if model["type"] == "Unigram":
        return None if model["unk_id"] is None else str(model["vocab"][model["unk_id"]][0])
    return model.get("unk_token")


def added_first_token(rust: RustTokenizer) -> int | None:
    """The id that the tokenizer prepends to every text, or None. Raises if it cannot encode every text."""
    whole, processor = rust.encode(_PROBE), rust.post_processor
    rust.post_processor = None
    plain = rust.encode(_PROBE)
    rust.post_processor = processor
    marked = list(zip(whole.ids, whole.special_tokens_mask, strict=True))
    if [token for token, is_added in marked if not is_added] != plain.ids:
        raise ValueError("the post_processor does not keep the text as it is")
    if unknown := [token for token, is_added in marked if is_added and rust.id_to_token(token) is None]:
        raise ValueError(f"the post_processor adds a token with id {unknown[0]}, which the vocabulary does not have")
    return marked[0][0] if marked and marked[0][1] else None


SEPARATOR = "<|endoftext|>"
"""Id 0 of the tokenizers trained here: separates documents, and starts a text without a prompt."""

# Pre-tokenization before BPE merges: words with one leading space or mark, English endings, numbers of up to three
# digits, runs of marks, whitespace.
SPLIT = (
    r"['\u2019](?i:s|t|d|m|re|ve|ll)(?!\p{L})|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenizerError(ValueError):
    """A tokenizer that cannot be used; the message names the file and the reason."""


class Tokenizer:
    """A loaded tokenizer. Immutable, safe to share between threads."""

    def __init__(self, rust: RustTokenizer, eos_token: str | None = None, bos_token: str | None = None) -> None:
        """Takes ownership of `rust`. Raises ValueError if the exact bytes of its tokens cannot be determined."""
        raw = json.loads(rust.to_str())
        self._format = piece_format(raw)
        self.unproven: Unproven = find_unproven(raw)
        """Parts of the tokenizer that are not known to run in linear time."""
        check_ids(rust)
        vocabulary = rust.get_vocab(with_added_tokens=True)
        added = {token.content for token in rust.get_added_tokens_decoder().values()}
        named = {token for token in (bos_token, eos_token) if token and token in vocabulary}
        rust.add_special_tokens([AddedToken(token, special=True) for token in named - added])
        self._rust = rust
        self._keeps_text = keeps_text(raw, vocabulary)
        self._composes_text = composes_text(raw, vocabulary)
        self._max_token_length = max(map(len, vocabulary))
        names = (bos_token, eos_token, unknown_token(raw["model"]))
        bos, eos, unknown = (vocabulary.get(name) if name else None for name in names)
        first = added_first_token(rust)
        rust.post_processor = untrimmed_processor(rust)
        self._special_ids = {token for token in (first, bos, eos, unknown) if token is not None}
        self.vocab_size: int = max(vocabulary.values()) + 1
        """Every id is below this."""
        self.adds_bos: bool = first is not None
        """Whether encode() prepends `bos_id` to every text."""
        self.bos_id: int | None = next((token for token in (first, bos, eos) if token is not None), None)
        """The token that starts a text; if there is none, the token that ends the previous text."""
        self.eos_id: int | None = eos
        """The token that ends a text."""

    @classmethod
    def load(cls, directory: Directory) -> Tokenizer:
        """Reads tokenizer.json, and the names of special tokens from the files next to it. Raises TokenizerError."""
        return cls.reader(directory)()

    @classmethod
    def reader(cls, directory: Directory) -> Callable[[], Tokenizer]:
        """load() in two steps: reads the files now; the returned function builds the tokenizer (slow, takes memory).

        Both raise TokenizerError.
        """
        path = directory / "tokenizer.json"
        try:
            text = read_tokenizer_json(path)
            settings = read_settings(directory)
        except ValueError as error:
            raise TokenizerError(str(error)) from None
        return lambda: cls._build(path, text, settings)

    @classmethod
    def _build(cls, path: File, text: str, settings: TokenizerSettings) -> Tokenizer:
        try:
            rust = RustTokenizer.from_str(text)
            rust.no_truncation()  # the service enforces the prompt length
            rust.no_padding()
            if isinstance(rust.model, models.BPE):
                rust.model.dropout = None  # for training only: encoding must be deterministic
            rust = with_settings(rust, settings)
            return cls(rust, settings.names.get("eos_token"), settings.names.get("bos_token"))
        except BaseException as error:  # a Rust panic is not an Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            problem = "" if isinstance(error, ValueError) else "invalid tokenizer: "
            raise TokenizerError(f"{path}: {problem}{_reason(error)}") from None

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, *, fewer: bool = False) -> Tokenizer:
        """Trains a byte-level BPE of `vocab_size` tokens.

        A text that supports fewer gives as many as it supports, or raises TokenizerError unless `fewer`.
        """
        rust = RustTokenizer(models.BPE())
        rust.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        rust.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[SEPARATOR],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
            max_token_length=LONGEST_PIECE,
        )
        rust.train_from_iterator(texts, trainer)
        tokenizer = cls(rust, SEPARATOR, SEPARATOR)
        if tokenizer.vocab_size != vocab_size and not fewer:
            raise TokenizerError(
                f"the text supports only {tokenizer.vocab_size} tokens, not {vocab_size}: give more text or a smaller "
                "vocabulary (--vocab-size)"
            )
        return tokenizer

    def files(self) -> dict[str, str]:
        """The files of this tokenizer: name -> content."""
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": None if self.eos_id is None else self._rust.id_to_token(self.eos_id),
            "bos_token": None if self.bos_id is None else self._rust.id_to_token(self.bos_id),
            "clean_up_tokenization_spaces": False,
        }
        return {"tokenizer.json": self._rust.to_str(), "tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}

    @property
    def kind(self) -> str:
        """Display name: "byte-level BPE", "SentencePiece-style BPE with byte fallback", "Unigram", "word-level"."""
        return self._format.kind

    def end_ids(self, named: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens that end a text. named: those from the model's config files, which take precedence."""
        return named or (() if self.eos_id is None else (self.eos_id,))

    def chat_end_ids(self, named: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens that end an answer in a chat: all that any file names. named: the ids in the model's config files.

        The tokenizer's own often ends a turn, and the model's a document.
        """
        return tuple(dict.fromkeys((*named, *(() if self.eos_id is None else (self.eos_id,)))))

    def start_id(self, named: int | None) -> int | None:
        """The token that starts a text without a prompt. named: the one from the model's config files, if any."""
        return self.bos_id if named is None else named

    def piece(self, token: int) -> str:
        """The token's vocabulary entry; empty for an id outside the vocabulary."""
        return self._rust.id_to_token(token) or ""

    def id_of(self, piece: str) -> int | None:
        """The id of a vocabulary entry, or None."""
        token: int | None = self._rust.token_to_id(piece)
        return token

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with the special tokens that the tokenizer adds; a BOS that the text has is not repeated."""
        # A batch of one releases the GIL; encoding a single text holds it, for seconds per megabyte.
        ids = list(self._rust.encode_batch_fast([text])[0].ids)
        return ids[1:] if self.adds_bos and ids[:2] == [self.bos_id] * 2 else ids

    def encode_spans(self, text: str, *, add_special_tokens: bool = True) -> CompactSpans:
        """encode(), with the span of `text` that each token covers; optionally without added special tokens."""
        return run_to_completion(self.span_slices(text, add_special_tokens=add_special_tokens))

    def span_slices(self, text: str, *, add_special_tokens: bool = True) -> Generator[None, None, CompactSpans]:
        """encode_spans() as a generator that yields between the pieces of a long text."""

        def encode(part: str) -> Spans:
            spans = self._spans(self._rust, part, add_special_tokens=add_special_tokens)
            names_bos = add_special_tokens and self.adds_bos and spans.ids[:2].tolist() == [self.bos_id] * 2
            return spans.without_first() if names_bos else spans

        return encode_in_pieces(encode, text)

    def part_slices(self, text: str, *, is_first: bool) -> Generator[None, None, CompactSpans]:
        """Like span_slices(), for a part of a prompt whose special tokens are given as ids.

        No special token is added, or read in the text; is_first: whether the tokenizer's space may precede the text.
        """
        rust = self._first_part if is_first else self._later_part
        return encode_in_pieces(lambda part: self._spans(rust, part), text)

    def _spans(self, rust: RustTokenizer, text: str, *, add_special_tokens: bool = True) -> Spans:
        spans = spans_of(rust.encode_batch([text], add_special_tokens=add_special_tokens)[0])
        if self._composes_text:
            close_gaps(spans, len(text))
        return spans

    @cached_property
    def _first_part(self) -> RustTokenizer:
        return part_tokenizer(self._rust, INFILL_NAMES, is_first=True)

    @cached_property
    def _later_part(self) -> RustTokenizer:
        return part_tokenizer(self._rust, INFILL_NAMES, is_first=False)

    def least_tokens(self, text: str) -> int:
        """Lower bound of the number of tokens of `text`; immediate, while encoding a megabyte takes a second."""
        return -(-len(text) // self._max_token_length) if self._keeps_text else 0

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        """encode() of each text, without added special tokens, on all cores."""
        return [encoding.ids for encoding in self._rust.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` as a continuation (see `strips_first_space`); invalid UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def iter_with_specials(self, ids: Iterable[int]) -> Iterator[bytes]:
        """UTF-8 of each token from the start of a text, special ones by name; encode() of the whole restores `ids`."""
        has_started = not self.strips_first_space
        for token in ids:
            if name := self.specials.get(token):
                yield name.encode()
            else:
                data = self.token_bytes(token)
                yield data if has_started else data.removeprefix(b" ")
                has_started = has_started or bool(data)

    def token_bytes(self, token: int) -> bytes:
        """bytes_of[token]; empty for an id that only the model has (its vocabulary may be padded)."""
        return self.bytes_of[token] if token < len(self.bytes_of) else b""

    @cached_property
    def specials(self) -> dict[int, str]:
        """The special tokens: id -> text."""
        added = self._rust.get_added_tokens_decoder()
        return {token: added[token].content for token in added if added[token].special} | {
            token: self.piece(token) for token in self._special_ids
        }

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The special tokens: text -> id."""
        return {text: token for token, text in self.specials.items()}

    @cached_property
    def bytes_of(self) -> list[bytes]:
        """The exact bytes of every token id; empty for special tokens and unused ids."""
        pieces = (self._rust.id_to_token(token) for token in range(self.vocab_size))
        table = [b"" if piece is None else self._format.bytes_of(piece) for piece in pieces]
        for token in self._rust.get_added_tokens_decoder():
            table[token] = self._format.bytes_of_added(self.piece(token))  # with a space in front that it stands for
        for token in self.specials:
            table[token] = b""
        return table

    @cached_property
    def strips_first_space(self) -> bool:
        """Whether the first space of the tokens is dropped at the start of a text (not of a continuation).

        SentencePiece prepends a space to every text, and word-level tokens include the space before them.
        """
        ids = self._rust.encode("a", add_special_tokens=False).ids
        return self._format.prefix == " " or self.decode(ids).startswith(" ")


def _reason(error: BaseException) -> str:
    return one_line(str(error)[:200]) or type(error).__name__
