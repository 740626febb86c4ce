"""The decoders of the notebooks, from the training script to POST /complete."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from model.train.__main__ import main as train
from tests.support.completion_client import stream, text_of, whole
from tests.support.model.tiny_models import TEXT
from tests.support.servers import Server, start_server, stop_server

pytestmark = pytest.mark.slow

SMALL = ["--layers", "2", "--width", "64", "--heads", "4", "--context", "64", "--vocab-size", "300", "--steps", "30"]


@contextmanager
def _server(folder: Path, *flags: str) -> Iterator[Server]:
    """The service around what the training script makes of `flags`."""
    assert train([*flags, "--out", str(folder / "model"), "--dtype", "float32", "--export-dtype", "float32"]) == 0
    server = start_server(folder, folder / "model", "--dtype", "float32")
    try:
        yield server
    finally:
        assert stop_server(server) == 0


@pytest.mark.parametrize("name", ["textbook", "standalone", "gpt"])
def test_a_trained_preset_streams_what_it_answers_in_one_piece(tmp_path: Path, name: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    with _server(tmp_path, "--data", str(text), "--preset", name, *SMALL) as server:
        body = {"prompt": "Once upon a time", "max_tokens": 30, "seed": 3, "ignore_eos": True}
        answer = whole(server.url, **body)
        assert answer["usage"]["completion_tokens"] == 30
        assert text_of(stream(server.url, **body)) == answer["choices"][0]["text"]


def test_the_toy_answers_both_questions_in_one_batch(tmp_path: Path) -> None:
    text = tmp_path / "statquest.txt"
    text.write_text("what is statquest <EOS> awesome <EOS>\nstatquest is what <EOS> awesome <EOS>\n", encoding="utf-8")
    with _server(tmp_path, "--data", str(text), "--preset", "toy") as server:
        prompts = ("what is statquest <EOS>", "statquest is what <EOS>")
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(lambda p: whole(server.url, prompt=p, temperature=0, logprobs=0), prompts))
    for answer in answers:
        (choice,) = answer["choices"]
        assert choice["text"] == " awesome"
        assert choice["finish_reason"] == "stop", "<EOS> comes next"
        assert answer["usage"]["completion_tokens"] == 2


def test_a_cross_model_trained_on_pairs_reverses_what_it_has_not_seen(tmp_path: Path) -> None:
    rng = random.Random(1)
    seen = {" ".join(rng.choices("1234567", k=rng.randint(2, 4))) for _ in range(1500)}
    unseen = [source for source in sorted(seen) if len(source) > 5][::20]
    lines = [f"{source}\t{_reversed(source)}\n" for source in sorted(seen - set(unseen))]
    (tmp_path / "pairs.tsv").write_text("".join(lines), encoding="utf-8")
    flags = ["--pairs", str(tmp_path / "pairs.tsv"), "--preset", "cross", "--tokenizer", "words"]
    shape = ["--layers", "1", "--width", "64", "--heads", "4", "--context", "16", "--steps", "400"]
    with _server(tmp_path, *flags, *shape) as server:
        answers = [whole(server.url, source=s, temperature=0)["choices"][0]["text"] for s in unseen]
        right = sum(answer == _reversed(source) for source, answer in zip(unseen, answers, strict=True))
        assert right >= 0.8 * len(unseen), (right, len(unseen))
        assert text_of(stream(server.url, source=unseen[0], temperature=0)) == answers[0]


def _reversed(source: str) -> str:
    return " ".join(reversed(source.split()))
