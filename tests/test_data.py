"""Training data: every kind of source, holding out, the cache, and an order that is a function of (seed, step)."""

from __future__ import annotations

import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import TEXT

from model.tokenizer import SEPARATOR
from model.train.data import Corpus, Order, prepare
from model.train.sources import Sources
from model.train.text_file import DataError
from model.train.vocabulary import Vocabulary

VOCABULARY = Vocabulary(kind="bpe", size=300, end_token=SEPARATOR)


def _prepare(sources: list[Path], cache: Path, straighten: float = 0.0) -> Corpus:
    return prepare(Sources([str(s) for s in sources]), cache, vocabulary=VOCABULARY, straighten=straighten)


def _documents(*names: object, **how: Any) -> list[str]:
    return [text for _, text in Sources([str(name) for name in names], **how).documents()]


def test_files_folders_patterns_and_compressed_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One.\n\n\nTwo.\r\n")
    (tmp_path / "b.jsonl").write_text('{"text": "Three."}\n\n{"text": "Four."}\n')
    (tmp_path / "c.md.gz").write_bytes(gzip.compress(b"Five."))
    (tmp_path / "d.png").write_bytes(b"\x89PNG")
    everything = ["One.", "Two.", "Three.", "Four.", "Five."]
    assert _documents(tmp_path) == everything
    assert _documents(tmp_path / "*.txt", tmp_path / "b.jsonl") == everything[:4]
    assert _documents(*[tmp_path / "a.txt"] * 2) == everything[:2] * 2


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"From a pipe.")))
    assert _documents("-") == ["From a pipe."]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.txt", None, "no such file"),
        ("empty.txt", b"", "no text"),
        ("binary.txt", b"\xff\xfe\x00\x01", "not UTF-8"),
        ("rows.jsonl", b'{"body": "x"}', '"text"'),
        ("rows.jsonl", b"x", '"text"'),
        ("broken.txt.gz", b"not gzip", "cannot be read"),
        ("damaged.txt.gz", gzip.compress(b"text " * 1000, mtime=0)[:30] + b"damage", "cannot be read"),
        ("rows.jsonl", b'{"text": "\\ud800"}', "whole characters"),
    ],
)
def test_sources_that_cannot_be_used_are_named(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        _documents(tmp_path / name)


def test_held_out_documents_are_never_trained_on_not_even_as_copies(tmp_path: Path) -> None:
    documents = [f"Document {i} says \u201chello\u201d {i * i}." for i in range(2000)]
    path = tmp_path / "a.txt"
    path.write_text("\n\n\n".join(documents))
    corpus = _prepare([path, path], tmp_path / "cache", straighten=0.5)
    held_out = corpus.tokenizer.decode(corpus.held_out.tolist())
    train = corpus.tokenizer.decode(corpus.train.tolist())
    numbers = {part.split()[0] for part in held_out.split("Document ")[1:]}
    assert 5 <= len(numbers) <= 60
    assert held_out.count("Document ") == len(numbers), "a held-out document counts once"
    for number in numbers:
        assert f"Document {number} says" not in train


def test_a_single_document_gives_up_its_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    corpus = _prepare([tmp_path], tmp_path / "cache")
    text = TEXT.strip("\n")
    assert corpus.tokenizer.decode(corpus.train.tolist()) + corpus.tokenizer.decode(corpus.held_out.tolist()) == text
    assert len(corpus.held_out) > 1


def test_copies_of_a_single_document_do_not_show_its_held_out_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" ".join(f"\u201cword {i}\u201d\u2026" for i in range(1000)))
    corpus = _prepare([tmp_path / "a.txt"] * 3, tmp_path / "cache", straighten=0.5)
    train = corpus.tokenizer.decode(corpus.train.tolist())
    numbers = re.findall(r"word (\d+)\b", corpus.tokenizer.decode(corpus.held_out.tolist()))
    assert len(numbers) > 30
    assert not any(f"word {number}" in train for number in numbers)


def test_straightened_documents_have_ascii_quotes_and_copies_differ(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    for share, curly in ((0.0, 2), (0.5, 1), (1.0, 0)):
        corpus = _prepare([tmp_path / "a.txt", tmp_path / "a.txt"], tmp_path / "cache", straighten=share)
        copies = corpus.tokenizer.decode(corpus.train.tolist())
        assert copies.count("\u201c") // 18 == curly


def test_the_cache_is_used_for_the_same_input_and_not_for_another(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    cache = tmp_path / "cache"
    first = _prepare([tmp_path / "a.txt"], cache)
    (made,) = cache.iterdir()
    stamp = (made / "train.bin").stat().st_mtime_ns
    assert _prepare([tmp_path / "a.txt"], cache).digest == first.digest
    assert (made / "train.bin").stat().st_mtime_ns == stamp
    (tmp_path / "a.txt").write_text(TEXT + "More.")
    assert _prepare([tmp_path / "a.txt"], cache).digest != first.digest
    assert len(list(cache.iterdir())) == 2


def test_the_order_is_a_function_of_seed_and_step_and_an_epoch_sees_everything_once() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    order = Order(tokens, length=10, windows=7, seed=1)
    batches = [order.batch(step) for step in range(40)]
    backwards = Order(tokens, length=10, windows=7, seed=1)
    assert all(np.array_equal(backwards.batch(step), batches[step]) for step in reversed(range(40)))
    epoch = np.concatenate(batches)[: order.per_epoch]
    assert len({row[0] for row in epoch}) == order.per_epoch
    assert all(np.array_equal(np.diff(row), np.ones(10)) for row in epoch)
    assert not np.array_equal(Order(tokens, length=10, windows=7, seed=2).batch(0), batches[0])


def test_too_little_text_for_a_window_is_refused() -> None:
    with pytest.raises(DataError, match="too few"):
        Order(np.arange(12, dtype=np.uint16), length=10, windows=1, seed=1)


def test_json_lines_with_line_separators_inside_stay_whole(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a\u2028b"}, ensure_ascii=False))
    assert _documents(tmp_path) == ["a\u2028b"]
