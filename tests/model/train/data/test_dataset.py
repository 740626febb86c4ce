"""Training data: every kind of source, holding out, the cache, word vocabularies, padding without effect.

The order of examples is a function of (seed, step).
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.config import ModelConfig
from model.presets import preset, reshaped
from model.tokenizer.tokenizer import SEPARATOR
from model.train.data.batch import IGNORE_INDEX, Example, StepOrder, evenly_spaced, pad_batch, shuffled_batches
from model.train.data.corpus import Corpus, document_of, held_out_rows, openings, prepare, split_documents
from model.train.data.dataset import dataset_of_examples, windows_of
from model.train.data.examples import examples_of_lines, examples_of_pairs
from model.train.data.sources import DataError, Sources
from model.train.data.token_cache import split_text
from model.train.data.vocabulary import END, Vocabulary, with_start_token
from model.train.step.objective import Objective
from tests.support.model.tiny_models import TEXT, tiny_decoder

VOCABULARY = Vocabulary(kind="bpe", size=300, end_token=SEPARATOR)


def _prepare(sources: list[Path], cache: Path, straighten: float = 0.0) -> Corpus:
    return prepare(Sources([str(s) for s in sources]), cache, vocabulary=VOCABULARY, straighten=straighten)


def _documents(*names: object, **how: Any) -> list[str]:
    return [text.decode() for _, text in Sources([str(name) for name in names], **how).documents()]


def test_files_folders_patterns_and_compressed_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One.\n\n\nTwo.\r\n")
    (tmp_path / "b.jsonl").write_text('{"text": "Three."}\n\n{"text": "Four."}\n')
    (tmp_path / "c.md.gz").write_bytes(gzip.compress(b"Five."))
    (tmp_path / "d.png").write_bytes(b"\x89PNG")
    everything = ["One.", "Two.", "Three.", "Four.", "Five."]
    assert _documents(tmp_path) == everything
    assert _documents(tmp_path / "*.txt", tmp_path / "b.jsonl") == everything[:4]
    assert _documents(*[tmp_path / "a.txt"] * 2) == everything[:2] * 2
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": "a\u2028b"}, ensure_ascii=False))
    assert _documents(tmp_path / "b.jsonl", text_key="body") == ["a\u2028b"]


def test_held_out_documents_are_never_trained_on_even_as_copies(tmp_path: Path) -> None:
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


def _split(texts: list[bytes], share: float) -> tuple[list[bytes], list[bytes]]:
    return split_documents([document_of(text) for text in texts], share)


def test_sample_prompts_are_openings_of_held_out_documents_without_headings() -> None:
    ending = "and went home without a word to anybody, as he had done on every evening of that long winter."
    story = "Once there was a miller who had three sons, a mill, a donkey and a cat, and who had to leave them all."
    spanish = "Contó el renegado la industria y medio que Zoraida le había dado para que a los dos se hablasen."
    chinese = "\u6545\u4e8b" * 60
    assert openings([f"{ending}\n\n{story}".encode()]) == ["Once there was a miller who had"]
    documents = [f"CHAPTER {i}\n\n{text}".encode() for i, text in enumerate((story, spanish, chinese))]
    expected = ["Once there was a miller who had", "Contó el renegado la industria y", chinese[:36]]
    assert openings(documents) == expected
    assert len(openings([f"Story {i:04} {spanish}".encode() for i in range(50)])) == 4
    assert openings(["\n\n".join(f"{name}. {story}" for name in "ABCDEFGH").encode()], 2)[1].startswith("E. Once")
    assert openings([b"short"]) == ["short"]


def test_with_few_documents_the_end_of_all_text_is_held_out() -> None:
    """The last chapter may be a page: once, 29 chapters were measured on 65 tokens of it."""
    texts = [*(f"chapter {i} \u2019".encode() * 100 for i in range(27)), b"the last but one " * 60, b"the end"]
    held_out, train = _split(texts, 0.01)
    assert 0.05 * sum(map(len, texts)) - 3 <= sum(map(len, held_out)) <= 0.05 * sum(map(len, texts))
    assert held_out[-2:] == texts[-2:] and train[-1] + held_out[0] == texts[26] and train[:-1] == texts[:26]
    assert all(text.decode() for text in (*held_out, *train))
    held_out, train = _split([*texts, texts[-1], texts[26]], 0.01)  # two of the chapters appear twice
    assert held_out[-1] == texts[-1] and texts[26] not in train
    book = TEXT.encode()
    for copies in (1, 3):
        (held_out,), train = _split([book] * copies, 0.01)
        assert b"".join(train) + held_out == book and len(held_out) > 1, "copies must not reveal its end"
    with pytest.raises(DataError, match="too short"):
        _split([b"x"] * 3, 0.01)


def test_larger_share_holds_out_a_superset() -> None:
    small, large = (set(_split([f"Document {i}.".encode() for i in range(1000)], share)[0]) for share in (0.01, 0.1))
    assert small < large
    assert 70 <= len(large) <= 130


def test_straightened_copies_have_ascii_quotes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text("held out " * 200)
    for share, curly in ((0.0, 2), (0.5, 1), (1.0, 0)):
        corpus = _prepare(
            [tmp_path / name for name in ("a.txt", "a.txt", "b.txt")], tmp_path / "cache", straighten=share
        )
        copies = corpus.tokenizer.decode(corpus.train.tolist())
        assert copies.count("\u201c") // 18 == curly


def test_order_is_a_function_of_seed_and_step_and_covers_an_epoch_once() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    order = StepOrder(tokens, length=10, windows=7, seed=1)
    batches = [order.batch(step) for step in range(40)]
    backwards = StepOrder(tokens, length=10, windows=7, seed=1)
    assert all(np.array_equal(backwards.batch(step), batches[step]) for step in reversed(range(40)))
    epoch = np.concatenate(batches)[: order.per_epoch]
    assert len({row[0] for row in epoch}) == order.per_epoch
    assert all(np.array_equal(np.diff(row), np.ones(10)) for row in epoch)
    assert not np.array_equal(StepOrder(tokens, length=10, windows=7, seed=2).batch(0), batches[0])


def test_held_out_split_and_digest_never_change(tmp_path: Path) -> None:
    """Runs on users' disks must resume with later versions."""
    documents = [f"Document {i} says \u201chello\u201d." for i in range(400)]
    (tmp_path / "a.txt").write_text("\n\n\n".join(documents))
    corpus = _prepare([tmp_path / "a.txt"], tmp_path / "cache", straighten=0.5)
    held_out = corpus.tokenizer.decode(corpus.held_out.tolist())
    assert [int(part.split()[0]) for part in held_out.split("Document ")[1:]] == [75, 102, 158, 378]
    assert corpus.digest == "bd984c072f50a6b32b497627f7692f4b6feb3010eb3c00860c91e185f0cce065"


@pytest.mark.parametrize(
    ("content", "documents"),
    [
        (b"\xef\xbb\xbfOne.\r\n\r\n\r\nTwo.\r\n", ["One.", "Two."]),
        ("Uno, dos \U0001f98a.\n\n\n\n\n\n日本語".encode(), ["Uno, dos \U0001f98a.", "日本語"]),
        (b"\n\n\n\nA\n\nB\n \n\nC", ["A\n\nB\n \n\nC"]),
        (b"old\rMac\rends", ["old\rMac\rends"]),
    ],
)
def test_line_ends_byte_order_marks_and_scripts_are_read(tmp_path: Path, content: bytes, documents: list[str]) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert _documents(tmp_path) == documents
    (tmp_path / "a.txt").unlink()
    (tmp_path / "b.md.gz").write_bytes(gzip.compress(content))
    assert _documents(tmp_path) == documents


def test_output_hidden_files_and_link_cycles_are_excluded(tmp_path: Path) -> None:
    for name in ("a.txt", ".git/b.txt", "._c.txt", "out/README.md", "deep/er/d.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    (tmp_path / "deep/circle").symlink_to("..")
    assert _documents(tmp_path, exclude=tmp_path / "deep/../out") == ["a.txt", "deep/er/d.md"]
    assert _documents(tmp_path) == ["a.txt", "deep/er/d.md", "out/README.md"]


def test_pipes_are_read_like_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"From standard input.")))
    assert _documents("-") == ["From standard input."]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("One.\n\n\nTwo."))
    writer.start()
    assert _documents(pipe) == ["One.", "Two."]
    writer.join()


@pytest.mark.parametrize("text", [TEXT * 5, "word " * 3000, "a \n\n  b! \t c.\n" * 900, "x" * 9999, "日本語" * 3333])
def test_pieces_of_a_long_text_have_the_tokens_of_the_whole(text: str) -> None:
    tokenizer = VOCABULARY.train([TEXT, "word " * 100])
    parts = list(split_text(text, 5000))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= 5000 and len(parts) > 1
    ids = [token for part in tokenizer.encode_many(parts) for token in part]
    if " " in text:
        assert ids == tokenizer.encode(text)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["train.bin", "held_out.bin", "tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("damage", [None, lambda content: content[:-7], lambda content: bytes(len(content))])
def test_damaged_token_cache_is_rebuilt(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_text(TEXT)
    _prepare([path], cache)
    (folder,) = cache.iterdir()
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    (folder / name).unlink()
    if damage:
        (folder / name).write_bytes(damage(before[name]))
    _prepare([path], cache)
    assert ("are damaged; tokenizing again" in capsys.readouterr().err) == (
        name != "manifest.json" or damage is not None
    )
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_cache_is_reused_for_the_same_input_and_old_entries_are_removed(tmp_path: Path) -> None:
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_text(TEXT)
    first = _prepare([path], cache)
    (folder,) = cache.iterdir()
    stamp = (folder / "train.bin").stat().st_mtime_ns
    assert _prepare([path], cache).digest == first.digest
    assert (folder / "train.bin").stat().st_mtime_ns == stamp
    (cache / ".tokens-torn").mkdir()
    (cache / "step-00000001").mkdir()
    for i in range(4):
        path.write_text(TEXT + str(i))
        last = _prepare([path], cache)
        assert last.digest != first.digest
    names = {path.name for path in cache.iterdir()}
    assert len(names) == 3 and {"step-00000001", last.digest[:16]} <= names


def test_unseen_texts_are_kept_by_file_and_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    for name in ("b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 300 + "\n\n\nTHE END")
    sources = Sources([str(tmp_path / "a.txt")])
    unseen = Sources([str(tmp_path / "[bc].txt")])
    corpus = prepare(sources, tmp_path / "cache", vocabulary=VOCABULARY, straighten=0.0, unseen=unseen)
    assert corpus.digest == _prepare([tmp_path / "a.txt"], tmp_path / "cache").digest
    names = [str(tmp_path / "b.txt"), str(tmp_path / "c.txt")]
    assert list(corpus.unseen) == names
    assert corpus.tokenizer.decode(corpus.unseen[names[0]].tolist()) == "b " * 300 + "THE END"
    assert corpus.unseen[names[0]].tolist().count(0) == 2
    with (tmp_path / "a.txt").open("a") as file:
        file.write("\n\n\nTHE END\n\n\n")
    assert prepare(sources, tmp_path / "cache", vocabulary=VOCABULARY, straighten=0.0, unseen=unseen).unseen
    with (tmp_path / "a.txt").open("a") as file:
        file.write("c " * 300)
    with pytest.raises(DataError, match=r"c\.txt: 2 of its 2 documents are also in --data"):
        prepare(sources, tmp_path / "cache", vocabulary=VOCABULARY, straighten=0.0, unseen=unseen)


@pytest.mark.parametrize("n_tokens", [2, 9, 10, 11, 100, 101, 4097, 5000])
def test_every_measured_token_is_a_target_once(n_tokens: int) -> None:
    tokens = np.arange(n_tokens, dtype=np.uint16)
    batches = windows_of(tokens, 10)
    pairs = torch.cat([torch.stack([b.inputs_RN, b.targets_RN]).flatten(1) for b in batches], dim=1)
    assert torch.equal(pairs, torch.stack([torch.arange(n_tokens - 1), torch.arange(1, n_tokens)]))
    assert max(len(batch.inputs_RN) for batch in batches) <= 204
    assert len(batches) <= 2 + n_tokens // 2040


WORDS = Vocabulary(kind="words", size=None, end_token="<EOS>")
STATQUEST = ["what is statquest <EOS> awesome <EOS>", "statquest is what <EOS> awesome <EOS>"]


def test_words_are_tokens_and_the_end_token_is_zero_anywhere() -> None:
    tokenizer = WORDS.train(STATQUEST)
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (6, END)
    assert len(set(tokenizer.encode("what is statquest awesome"))) == 4
    ids = tokenizer.encode(STATQUEST[0])
    assert [i for i, token in enumerate(ids) if token == END] == [3, 5]
    assert tokenizer.encode("what is statquest<EOS>awesome  <EOS>") == ids


def test_unknown_word_is_one_token_and_rare_words_are_dropped() -> None:
    tokenizer = WORDS.train(["a a b <unk>"])
    unknown = tokenizer.encode("<unk>")
    assert len(unknown) == 1 and tokenizer.encode("never seen a") == [*unknown * 2, *tokenizer.encode("a")]
    few = dataclasses.replace(WORDS, size=3).train(["a a b"])
    assert few.vocab_size == 3
    assert few.encode("a b") == [2, 1]


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_any_word_can_be_the_end_token_and_start_prompts(kind: str) -> None:
    vocabulary = Vocabulary(kind=kind, size=300, end_token="<END>")  # type: ignore[arg-type]
    tokenizer = vocabulary.train([TEXT])
    assert tokenizer.encode("<END>") == [END]
    assert "<|endoftext|>" not in "".join(tokenizer.files().values())
    ids = tokenizer.encode("the moon")
    assert END not in ids
    with_start = with_start_token(tokenizer, "<END>")
    assert with_start.encode("the moon") == [END, *ids]
    assert with_start.encode("") == [END]
    assert with_start.encode_many(["the moon"]) == [ids]


def _config(n_encoder_layers: int) -> ModelConfig:
    shape = reshaped(preset("cross"), width=32, n_heads=4, n_layers=2)
    return dataclasses.replace(shape, vocab_size=20, context=16, n_encoder_layers=n_encoder_layers)


@pytest.mark.parametrize("with_source", [False, True])
def test_padding_does_not_count_in_the_loss(with_source: bool) -> None:
    decoder = tiny_decoder(_config(2 if with_source else 0))
    objective = Objective(decoder, torch.device("cpu"), torch.float32)
    rows = [([3, 4], [5]), ([3, 4, 5, 6, 7, 8], [9, 10, 11, 12]), ([1, 2, 3], [4, 5])]
    examples = [Example(tokens, source if with_source else None) for tokens, source in rows]
    together = pad_batch(examples)
    assert together.inputs_RN.shape == (3, 5)
    assert together.n_targets == 1 + 5 + 2
    alone = [objective.loss_sum(pad_batch([example])) for example in examples]
    assert torch.allclose(objective.loss_sum(together), torch.stack(alone).sum(), atol=1e-3)
    parts = [objective.loss_sum(part) for part in together.split(2)]
    assert len(parts) == 2
    assert torch.allclose(torch.stack(parts).sum(), torch.stack(alone).sum(), atol=1e-3)
    unmasked = dataclasses.replace(
        together, targets_RN=together.targets_RN.masked_fill(together.targets_RN == IGNORE_INDEX, 0)
    )
    assert objective.loss_sum(unmasked) > objective.loss_sum(together) + 0.1, "positive control"


def test_example_order_is_a_function_of_seed_and_step_and_covers_an_epoch_once() -> None:
    examples = [Example([i, i + 1]) for i in range(10)]
    order, backwards, other = (shuffled_batches(examples, rows=4, seed=seed) for seed in (1, 1, 2))
    batches = [order(step).inputs_RN for step in range(5)]
    assert all(torch.equal(backwards(step).inputs_RN, batches[step]) for step in reversed(range(5)))
    seen = torch.cat(batches).flatten().tolist()
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert not torch.equal(other(0).inputs_RN, batches[0])


def test_quick_measurement_samples_all_texts() -> None:
    batches = [pad_batch([Example([i, i, i])]) for i in range(6)]

    def sampled(n_targets: float) -> list[int]:
        return [int(batch.inputs_RN[0, 0]) for batch in evenly_spaced(batches, n_targets)]

    assert sampled(0) == [0] and sampled(4) == [0, 3] and sampled(6) == [0, 2, 4]
    assert sampled(12) == sampled(math.inf) == [0, 1, 2, 3, 4, 5]


def test_rows_are_held_out_only_if_there_are_enough() -> None:
    assert held_out_rows(map(str, range(19))) == set()
    assert len(held_out_rows([*map(str, range(20)), "1", "2"])) == 1
    assert len(held_out_rows(map(str, range(1000)))) == 10


def test_held_out_lines_and_pairs_are_never_trained_on_even_as_copies(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_text("".join(f"w{i} x{i}\ty{i}\nw{i}  x{i}\tz{i}\n" for i in range(100)))
    lines = examples_of_lines(Sources([str(path)]), vocabulary=WORDS, from_end=True, context=16)
    pairs = examples_of_pairs(Sources([str(path)]), vocabulary=WORDS, context=16)
    for texts, n_held_out in ((lines, 2), (pairs, 1)):
        material = dataset_of_examples(texts, None, rows=7, seed=1)
        (held_out,) = material.held_out
        assert material.measured == "held-out"
        assert material.per_epoch == 200 - 2
        assert len(held_out.inputs_RN) == n_held_out
        # The tokenizer was not trained on their words either.
        assert (held_out.inputs_RN if held_out.sources is None else held_out.sources.tokens_RS).eq(1).any()


@pytest.mark.parametrize("from_end", [True, False])
def test_lines_end_with_one_end_token_and_start_with_one_or_with_their_first_word(
    tmp_path: Path, from_end: bool
) -> None:
    path, lines = tmp_path / "lines.txt", [*STATQUEST, "awesome is statquest"]
    path.write_text("\n".join([lines[0], f"<EOS> {lines[1]}" if from_end else lines[1], "", lines[2]]))
    texts = examples_of_lines(Sources([str(path)]), vocabulary=WORDS, from_end=from_end, context=7)
    material = dataset_of_examples(texts, None, rows=3, seed=1)
    encode_many, batch = material.tokenizer.encode_many, material.batch(0)
    rows = {
        (int(row[0]), *t[t.ne(IGNORE_INDEX)].tolist()) for row, t in zip(batch.inputs_RN, batch.targets_RN, strict=True)
    }
    without_end = encode_many([line.removesuffix(" <EOS>") for line in lines])
    assert rows == {(*[END] * from_end, *ids, END) for ids in without_end}
    assert material.tokenizer.encode("") == [END] * from_end, "prompts must start like rows"
    prompt = material.prompts[0]
    assert prompt.text == "what is statquest <EOS>"
    assert prompt.tokens == material.tokenizer.encode(prompt.text)
