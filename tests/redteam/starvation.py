"""Starvation: what one tenant's costly work does to another tenant's ordinary requests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from random import Random
from typing import Any

from tests.redteam.attack import Load, Setting, attack, measure_slowdown
from tests.redteam.http_client import as_json, open_stream, percentile, request_bytes, token_gaps
from tests.redteam.service import Target
from tests.redteam.weights_files import copied_weights

VICTIM, ATTACKER = 0, 1
STREAMS, THREADS = 31, 8
KNOWN_BOMB = 'start: s\ns: s s s | s s | /[a-z ,.]/ | ""'
TERMINALS = ("/[a-z ,.]/", "/[a-z ]+/", "/./", "/[^a]/", '"a"', "/[a-z]{1,3}/", "/(.|\\n)/", "/[ a-zA-Z,.;]/")
VICTIM_SECONDS = 5.0
"""Time-out of the victim; a longer wait is not measured."""
GRAMMAR_FACTOR = 3.0
"""Floor of the promise on gaps between tokens concurrent with guided requests."""


class GrammarGenerator:
    """Ambiguous grammars, nullable recursion, large repetitions; some behind a cheap beginning."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    def next(self) -> dict[str, str]:
        """The request field of a random grammar: its name and value."""
        return self.rng.choice([self._grammar, self._grammar, self._grammar, self._regex, self._schema])()

    def _grammar(self) -> dict[str, str]:
        if self.rng.random() < 0.1:
            return {"grammar": KNOWN_BOMB}
        names = "stuvw"[: self.rng.randint(1, 3)]
        rules = []
        for name in names:
            alternatives = [
                " ".join(self.rng.choices(names, k=self.rng.randint(2, 5))) for _ in range(self.rng.randint(1, 4))
            ]
            alternatives += self.rng.choices(TERMINALS, k=self.rng.randint(1, 3))
            if self.rng.random() < 0.7:
                alternatives.append('""')
            self.rng.shuffle(alternatives)
            suffix = self.rng.choice(["", "", "", "?", "*", "+"])
            rules.append(f"{name}: " + " | ".join(a if '"' in a else f"({a}){suffix}" for a in alternatives))
        long = f"/[a-z ,.]{{{self.rng.randint(10, 60)}}}/ "
        prefix = self.rng.choice(["", "", '"a" ', "/[a-z ,]{3,9}/ ", long, '("a" | "b")* '])
        return {"grammar": "\n".join([f"start: {prefix}s", *rules])}

    def _regex(self) -> dict[str, str]:
        n = self.rng.choice([10, 50, 200, 1000, 5000])
        part = self.rng.choice([
            "(a?){N}", "(.*a){N}", "(.{0,N}){0,9}", "[a-z]{0,N}b", "((a|b|c)*d?){N}", ".*[a-f].{N}", "(.?.?){N}",
        ])  # fmt: skip
        return {"regex": self.rng.choice(["", "[a-z ]{5,20}"]) + part.replace("N", str(n))}

    def _schema(self) -> dict[str, str]:
        return {"json_schema": as_json(self._value(0))}

    def _value(self, depth: int) -> dict[str, Any]:
        if depth > 3:
            pattern = f"^(.{{0,{self.rng.randint(1, 500)}}}a){{0,{self.rng.randint(1, 40)}}}$"
            return {"type": "string", "pattern": pattern}
        kind = self.rng.randrange(3)
        if kind == 0:
            names = [f"p{i}" for i in range(self.rng.randint(1, 60))]
            return {"type": "object", "properties": {name: self._value(depth + 2) for name in names}}
        if kind == 1:
            return {"anyOf": [self._value(depth + 1) for _ in range(self.rng.randint(1, 6))]}
        return {"type": "array", "items": self._value(depth + 1), "maxItems": self.rng.choice([3, 100, 5000])}


def _waited(target: Target, path: str, body: dict[str, Any]) -> float:
    """Seconds of a request of the victim; its time-out if it fails."""
    response = target.call("POST", path, tenant=VICTIM, body=body, timeout=VICTIM_SECONDS)
    return response.seconds if response.status == 200 else VICTIM_SECONDS


def _send(target: Target, path: str, body: dict[str, Any]) -> None:
    target.call("POST", path, tenant=ATTACKER, body=body, timeout=20)


def _streams(target: Target, fields: dict[str, Any], count: int) -> Load:
    """Streams of the attacker; each starts again when it ends."""
    body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, **fields}
    message = request_bytes("POST", "/complete", key=target.keys[ATTACKER], body=body)

    def read(_: int) -> None:
        with target.address.connect(timeout=20) as connection, connection.makefile("rb") as file:
            connection.sendall(message)
            while line := file.readline():
                if line.startswith((b"event: done", b"event: error", b"HTTP/1.1 4", b"HTTP/1.1 5")):
                    return

    return Load(read, count)


@attack("grammar-masks", share=16.0)
def grammar_masks(setting: Setting) -> None:
    """Grammars whose masks are slow, within the step that all streams share."""
    target, report = setting.target, setting.report
    bomb = _worst_of_many(setting)
    found = measure_slowdown(
        lambda: _worst_gap(target, 100),
        _streams(target, bomb, STREAMS),
        baseline=_streams(target, {}, STREAMS),
        budget=setting.budget.share(0.6),
    )
    limit = max(GRAMMAR_FACTOR * found.alone, found.alone + 0.05)
    report.worst = f"p99 gap {found.loaded * 1e3:.0f} ms, with plain streams {found.alone * 1e3:.0f} ms"
    report.limit = f"{limit * 1e3:.0f} ms"
    if found.loaded > limit:
        report.add("high", f"{STREAMS} guided streams of another key: {report.worst}", as_json(bomb))


def _worst_gap(target: Target, tokens: int) -> float:
    """99th percentile of the seconds between tokens of one plain stream of the victim."""
    body = {"prompt": "The old house", "max_tokens": tokens, "ignore_eos": True, "seed": 3}
    with open_stream(target.address, body, key=target.keys[VICTIM], timeout=VICTIM_SECONDS) as (_, events):
        return percentile(token_gaps(events), 0.99)


def _worst_of_many(setting: Setting) -> dict[str, str]:
    """Runs grammars concurrently with a short stream of the victim; returns the most costly one."""
    generator, tried = GrammarGenerator(setting.rng), [(0.0, {"grammar": KNOWN_BOMB})]
    for _ in setting.tries(setting.budget.share(0.4)):
        bomb = generator.next()
        with _streams(setting.target, bomb, 2):
            time.sleep(0.1)
            try:
                tried.append((_worst_gap(setting.target, 40), bomb))
            except OSError:
                tried.append((VICTIM_SECONDS, bomb))
    return max(tried, key=lambda one: one[0])[1]


@attack("guide-compilation", share=9.0)
def grammar_compilation(setting: Setting) -> None:
    """Costly regexes, schemas and grammars, each a new one, during another key's small ones."""
    generator, target, rng = GrammarGenerator(setting.rng), setting.target, setting.rng
    numbers = itertools.count()
    bombs = [generator.next() for _ in range(400)]

    def send(index: int) -> None:
        number = next(numbers)
        fields = dict(bombs[(index * 37 + number) % len(bombs)])
        if "grammar" in fields:  # a comment makes it a different grammar
            fields["grammar"] += f"\n// {number}"
        elif "regex" in fields:
            fields["regex"] += f"{number}?"
        _send(target, "/complete", {"prompt": "a", "max_tokens": 1, "stream": False, **fields})

    def victim() -> float:
        regex = f"[a-z ]{{2,{rng.randint(3, 902)}}}"
        return _waited(target, "/complete", {"prompt": "a", "max_tokens": 2, "stream": False, "regex": regex})

    _report_slowdown(setting, "small regex", victim, Load(send, 20), repro=as_json(bombs[0]))


@attack("long-texts", share=9.0)
def long_texts(setting: Setting) -> None:
    """Texts of a megabyte to tokenize, during another key's text of a few thousand characters."""
    target = setting.target
    numbers = itertools.count()
    texts = [_text(setting.rng) for _ in range(8)]
    victim = {"prompt": "It was a bright cold day in April. " * 186}

    def send(index: int) -> None:
        number = next(numbers)
        body = {"prompt": texts[(index + number) % len(texts)] + str(number)}
        _send(target, "/tokenize" if index % 2 else "/complete", body)

    repro = "20 x POST /tokenize " + as_json({"prompt": texts[0][:40] + "... 1,000,000 characters"})
    what = "text of 6,500 characters"
    _report_slowdown(setting, what, lambda: _waited(target, "/tokenize", victim), Load(send, 20), repro=repro)


def _text(rng: Random) -> str:
    size = 1_000_000
    unit = rng.choice([
        "a", " ", "ab", "1", "\n", "the quick brown fox ", "".join(chr(rng.randint(33, 126)) for _ in range(997)),
        "".join(rng.choice("abcdefghij \n") for _ in range(9973)),
    ])  # fmt: skip
    return (unit * (size // len(unit) + 1))[:size]


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}bot: {% endif %}"
)


@attack("chat-templates", share=10.0, needs_launcher=True)
def chat_templates(setting: Setting) -> None:
    """Conversations of thousands of messages, during another key's short one."""
    launcher, rng = setting.own_launcher, setting.rng
    weights = copied_weights(launcher)
    (weights / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    route, victim = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    with launcher.running(weights=weights) as target:

        def send(_: int) -> None:
            count = rng.choice([2000, 5000, 20_000])
            content = rng.choice(["x", "{{ messages }}", "\u00e9" * 10, "a " * 10])
            message = {"role": "user", "content": content * (400_000 // count // len(content) or 1)}
            _send(target, route, {"messages": [message] * count, "max_tokens": 1})

        repro = as_json({"messages": "20,000 x {role: user, content: x}"})
        what = "chat of one message"
        _report_slowdown(setting, what, lambda: _waited(target, route, victim), Load(send, 20), repro=repro)


COSTLY: dict[str, tuple[str, Callable[[Random], dict[str, Any]]]] = {
    "many choices with logprobs": ("/complete", lambda _: {"n": 16, "logprobs": 20, "max_tokens": 100}),
    "many prompts": ("/complete", lambda rng: {"prompt": [f"a{rng.random()}" for _ in range(64)], "max_tokens": 3}),
    "echo with logprobs": (
        "/complete",
        lambda _: {"prompt": "a b " * 200, "echo": True, "logprobs": 20, "max_tokens": 1},
    ),
    "scores": ("/score", lambda _: {"prompt": ["a b " * 200] * 8, "logprobs": 20}),
    "many ids": ("/detokenize", lambda rng: {"tokens": [rng.randrange(4000) for _ in range(150_000)]}),
    "stops that nearly match": (
        "/complete",
        lambda _: {"stop": ["e " * 127 + chr(97 + i) for i in range(16)], "max_tokens": 400},
    ),
    "long list of wrong types": ("/complete", lambda _: {"prompt": ["a", 1] * 100_000}),
    "many wrong fields": ("/complete", lambda _: {f"field{i}": i for i in range(40_000)}),
    "many biases": (
        "/complete",
        lambda rng: {"logit_bias": {str(rng.randrange(4000)): 1 for _ in range(300)}, "n": 16},
    ),
}
"""Valid and invalid requests that cost more than they look: a route, and the fields of a body."""


@attack("costly-requests", share=12.0)
def costly_requests(setting: Setting) -> None:
    """Each kind of costly request of one key, during another key's shortest completion."""
    target, report = setting.target, setting.report
    report.limit = "5 times that with plain requests"
    body = {"prompt": "a", "max_tokens": 1, "stream": False}
    kinds = setting.rng.sample(list(COSTLY), len(COSTLY))
    worst = 0.0
    for number in setting.tries(most=min(setting.most_tries, len(kinds))):
        path, fields = COSTLY[kinds[number]]
        start = {"prompt": "a"} if path == "/complete" else {}
        load = _load(target, path, [{**start, **fields(setting.rng)} for _ in range(4)])
        plain = _load(target, "/complete", [body])
        budget = setting.budget.share(1 / len(kinds))
        found = measure_slowdown(lambda: _waited(target, "/complete", body), load, budget=budget, baseline=plain)
        figure = f"{found.loaded * 1e3:.0f} ms, with plain requests {found.alone * 1e3:.0f} ms"
        if found.is_excessive:
            repro = f"{THREADS} x POST {path} {as_json({**start, **fields(setting.rng)})[:300]}"
            summary = f"{kinds[number]}: a token of another key takes {figure}"
            report.add("medium", summary, repro, group=kinds[number])
        if found.loaded / found.limit > worst:
            worst = found.loaded / found.limit
            report.worst = f"{kinds[number]}: {figure}"
        target.settle()


def _load(target: Target, path: str, bodies: list[dict[str, Any]]) -> Load:
    return Load(lambda index: _send(target, path, bodies[index % len(bodies)]), THREADS)


def _report_slowdown(setting: Setting, what: str, victim: Callable[[], float], load: Load, *, repro: str) -> None:
    report = setting.report
    found = measure_slowdown(victim, load, budget=setting.budget)
    report.tries = load.rounds
    report.worst = f"{what}: {found.loaded * 1e3:.0f} ms, alone {found.alone * 1e3:.0f} ms"
    report.limit = f"{found.limit * 1e3:.0f} ms"
    if found.is_excessive:
        report.add("high", f"another key's load slows a {report.worst}", repro)
