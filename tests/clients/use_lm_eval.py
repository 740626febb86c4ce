"""lm-eval's local-completions: tasks of all three kinds, sent in every way, against a direct pass of the model.

Argument: the service, in float32. Variables: CLIENT_WEIGHTS, and CLIENT_ORACLE, the Python that has the model.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HOME = Path(tempfile.mkdtemp())
# Set before the imports, so that nothing is downloaded and nothing is stored outside this run's folder.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(HOME), "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}

import requests  # noqa: E402
from checks import run_checks  # noqa: E402
from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # noqa: E402

logging.disable(logging.WARNING)
URL = sys.argv[1]
WEIGHTS = os.environ["CLIENT_WEIGHTS"]
MODEL = requests.get(f"{URL}/v1/models", timeout=60).json()["data"][0]
CONTEXT = MODEL["max_model_len"]
N_GENERATED = 24
TOLERANCE = 1e-4
"""Of a log-likelihood, in nats."""
TOLERANCE_OF_A_TOKEN = 1e-5
"""Of a document's log-likelihood for each of its tokens: torch sums a row of 49,000 float32 numbers to about 5e-6."""

QUESTIONS = [
    {"context": "The sun rises in the", "choices": [" east", " west", " kitchen, of course"], "label": 0},
    {
        "context": "She took the letter, and her hand",
        "choices": [" trembled.", " was a fox \U0001f98a.", " sang"],
        "label": 0,
    },
    {"context": "", "choices": ["It was a dark night.", "caf\u00e9 au lait"], "label": 0},
    {"context": "\u201cWho are you?\u201d asked the ", "choices": ["stranger", "owl", "\u8336"], "label": 1},
    {"context": "One two three four " * 40, "choices": ["five", "one two"], "label": 1},
    {"context": "1, 2, 3, 1, 2, 3, " * 9 + "1, 2,", "choices": [" 3", " two"], "label": 0},
]
OPENINGS = ["Once upon a time", "The old captain looked at", "\u201cI do not know,\u201d said", "In the year 1812"]
SENTENCES = (
    "The rain had stopped. He walked to the harbour and counted ships: seven, \u00e9t\u00e9 and all \U0001f98a. "
)
DOCUMENTS = ["A short one.", SENTENCES * 5, "Caf\u00e9 \u8336 \u2014 na\u00efve."]
LONG_DOCUMENT = SENTENCES * 60

_TOKENIZER = json.loads((Path(WEIGHTS) / "tokenizer_config.json").read_text())
# The prefix of a text without context, and the stops of generations, as lm-eval sets them.
PREFIX_TEXT = _TOKENIZER["bos_token"]
END_TEXT = _TOKENIZER["eos_token"]
# (batch size, tokenized_requests, tokenizer_backend, num_concurrent)
ORACLE = subprocess.Popen(
    [os.environ["CLIENT_ORACLE"], Path(__file__).with_name("oracle.py"), WEIGHTS],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
)
WAYS = [*itertools.product((1, 4), (True, False), ("remote", "huggingface"), (1,)), (2, True, "remote", 4)]


def check_log_likelihoods_equal_a_direct_pass() -> None:
    worst = 0.0
    for way in WAYS:
        for got, expected in zip(scores("choice", way), choice_oracle(), strict=True):
            worst = max(worst, abs(got[0] - expected[0]))
            assert got[1] == expected[1], f"{way}: greedy is {got[1]}"
    assert worst <= TOLERANCE, worst
    print(f"     largest difference of a log-likelihood: {worst:.1e}")


def check_perplexities_equal_a_direct_pass() -> None:
    worst = 0.0
    lengths = [len(ids) for ids in encode(DOCUMENTS)]
    for way in WAYS:
        for got, expected, length in zip(scores("rolling", way), rolling_oracle(*DOCUMENTS), lengths, strict=True):
            worst = max(worst, abs(got - expected) / length)
    assert worst <= TOLERANCE_OF_A_TOKEN, worst
    print(f"     largest difference of a document's log-likelihood, by token: {worst:.1e}")


def check_a_document_longer_than_the_context() -> None:
    # As ids only: a window that begins inside a word has other ids when its text is tokenized again.
    way = (1, True, "remote", 1)
    (got,) = scores("long", way)
    ((expected,), (ids,)) = rolling_oracle(LONG_DOCUMENT), encode([LONG_DOCUMENT])
    assert abs(got - expected) <= TOLERANCE_OF_A_TOKEN * len(ids), (got, expected)


def check_scores_do_not_depend_on_how_requests_are_sent() -> None:
    for kind in ("choice", "rolling"):
        alone, *others = [scores(kind, way) for way in WAYS]
        assert all(other == alone for other in others), kind


def check_both_greedy_flags_occurred() -> None:
    assert {greedy for _, greedy in choice_oracle()} == {True, False}


def check_generations_equal_the_reference() -> None:
    for way in WAYS:
        for got, expected in zip(scores("generate", way), generate_oracle(), strict=True):
            assert got == expected, way


def check_local_and_remote_tokenizers_give_the_same_ids() -> None:
    texts = [*DOCUMENTS, *OPENINGS, PREFIX_TEXT + "Once"]
    for text, ids in zip(texts, encode(texts), strict=True):
        tokenized = requests.post(
            f"{URL}/tokenize", json={"prompt": text, "add_special_tokens": False}, timeout=60
        ).json()
        assert tokenized["tokens"] == ids and tokenized["count"] == len(ids) and tokenized["max_model_len"] == CONTEXT
        back = requests.post(f"{URL}/detokenize", json={"tokens": ids}, timeout=60).json()
        assert back["prompt"] == text


def scores(kind: str, way: tuple[int, bool, str, int]) -> list[Any]:
    """The results of lm-eval's tasks in the order of the requests: [(log-likelihood, greedy)], sums, or completions."""
    kinds = ("long",) if kind == "long" else ("choice", "rolling", "generate")
    samples = sorted(evaluate(kinds, way)[f"ink_{kind}"], key=lambda sample: sample["doc_id"])
    return [response[0] for sample in samples for response in sample["resps"]]


@functools.cache
def evaluate(kinds: tuple[str, ...], way: tuple[int, bool, str, int]) -> dict[str, list[dict[str, Any]]]:
    """lm-eval's samples of several tasks, by the name of the task."""
    batch_size, tokenized, backend, concurrent = way
    arguments = {
        "model": MODEL["id"],
        "base_url": f"{URL}/v1/completions",
        "tokenizer_backend": backend,
        "tokenized_requests": tokenized,
        "num_concurrent": concurrent,
        "max_length": CONTEXT,
        **({"tokenizer": WEIGHTS} if backend == "huggingface" else {}),
    }
    tasks = [task(kind) for kind in kinds]
    # Its progress bars go to stderr.
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
        results = simple_evaluate(
            model="local-completions",
            model_args=arguments,
            tasks=tasks,
            task_manager=TaskManager(include_defaults=False),  # listing its built-in tasks takes ten seconds
            batch_size=batch_size,
            bootstrap_iters=0,
        )
    samples: dict[str, list[dict[str, Any]]] = results["samples"]
    return samples


def task(kind: str) -> dict[str, Any]:
    """A task over local JSON, as a YAML file of lm-eval would define it."""
    rows, shape = {
        "choice": (
            QUESTIONS,
            {"output_type": "multiple_choice", "doc_to_text": "{{context}}", "doc_to_choice": "{{choices}}"}
            | {"doc_to_target": "label", "target_delimiter": "", "metric_list": [{"metric": "acc"}]},
        ),
        "generate": (
            [{"text": text, "answer": ""} for text in OPENINGS],
            {"output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{answer}}"}
            | {"generation_kwargs": {"until": ["\n\n"], "max_gen_toks": N_GENERATED, "do_sample": False}}
            | {"metric_list": [{"metric": "exact_match"}]},
        ),
        "rolling": ([{"text": text} for text in DOCUMENTS], _ROLLING),
        "long": ([{"text": LONG_DOCUMENT}], _ROLLING),
    }[kind]
    file = HOME / f"{kind}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
    return {"task": f"ink_{kind}", **data, **shape}


_ROLLING = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"} | {
    "metric_list": [{"metric": "bits_per_byte"}]
}


@functools.cache
def prefix() -> int:
    """The id that stands in for an empty context."""
    ((token,),) = encode([PREFIX_TEXT])
    return token


@functools.cache
def choice_oracle() -> list[tuple[float, bool]]:
    """Log-likelihood and greedy flag of every choice of every request."""
    pairs = [(request["context"], choice) for request in QUESTIONS for choice in request["choices"]]
    # lm-eval moves trailing spaces of the context to the continuation; an empty context becomes a prefix token.
    contexts = encode([context.rstrip() for context, _ in pairs])
    wholes = encode([context + choice for context, choice in pairs])
    return score(
        [
            (len(context), whole) if context else (1, [prefix(), *whole])
            for context, whole in zip(contexts, wholes, strict=True)
        ]
    )


@functools.cache
def rolling_oracle(*documents: str) -> list[float]:
    """The log-likelihood of every document, in lm-eval's windows."""
    sums = []
    for ids in encode(documents):
        # lm-eval reserves one position for the token that the service must generate, and one for the prefix.
        windows = get_rolling_token_windows(ids, prefix_token=prefix(), max_seq_len=CONTEXT - 2, context_len=1)
        pieces = [make_disjoint_window(window) for window in windows]
        sums.append(sum(logprob for logprob, _ in score([(len(a), a + b) for a, b in pieces])))
    return sums


@functools.cache
def generate_oracle() -> list[str]:
    """Greedy completions up to the first of lm-eval's stops."""
    texts = ask(prompts=encode(OPENINGS), n=N_GENERATED)
    return [text.partition("\n\n")[0].partition(END_TEXT)[0] for text in texts]


def encode(texts: Sequence[str]) -> list[list[int]]:
    """Ids by our own tokenizer."""
    return ask(texts=texts)


def score(rows: list[tuple[int, list[int]]]) -> list[tuple[float, bool]]:
    """Log-likelihood and greedy flag of what follows the first n ids of each row."""
    logprobs = ask(rows=[ids for _, ids in rows])
    rests = [row[n - 1 :] for (n, _), row in zip(rows, logprobs, strict=True)]
    return [(sum(logprob for logprob, _ in rest), all(greedy for _, greedy in rest)) for rest in rests]


def ask(**request: Any) -> list[Any]:
    """The response of the oracle."""
    assert ORACLE.stdin and ORACLE.stdout
    print(json.dumps(request), file=ORACLE.stdin, flush=True)
    answer: list[Any] = json.loads(ORACLE.stdout.readline())
    return answer


if __name__ == "__main__":
    run_checks(dict(vars()))
