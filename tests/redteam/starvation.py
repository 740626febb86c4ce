"""Starvation: what one tenant's costly work does to another tenant's ordinary requests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from random import Random
from typing import Any, ClassVar

from tests.redteam.attack import Attack, Budget, Load, Setting, measure_slowdown
from tests.redteam.http_client import call, open_stream, percentile, request_bytes, token_gaps
from tests.redteam.service import Target, as_json
from tests.redteam.weights_files import copied_weights

VICTIM, ATTACKER = 0, 1
KNOWN_BOMB = 'start: s\ns: s s s | s s | /[a-z ,.]/ | ""'
VICTIM_SECONDS = 5.0
"""Time-out of the victim; a longer wait is not measured."""
GRAMMAR_FACTOR = 3.0
"""Floor of the promise on gaps between tokens concurrent with guided requests."""


class GrammarGenerator:
    """Ambiguous grammars, nullable recursion, large repetitions; some behind a cheap beginning."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    def next(self) -> dict[str, str]:
        """The request field of a grammar: its name and value."""
        return self.rng.choice([self._grammar, self._grammar, self._grammar, self._regex, self._schema])()

    def _terminal(self) -> str:
        return self.rng.choice(
            ["/[a-z ,.]/", "/[a-z ]+/", "/./", "/[^a]/", '"a"', "/[a-z]{1,3}/", "/(.|\\n)/", "/[ a-zA-Z,.;]/"]
        )

    def _grammar(self) -> dict[str, str]:
        if self.rng.random() < 0.1:
            return {"grammar": KNOWN_BOMB}
        names = "stuvw"[: self.rng.randint(1, 3)]
        rules = []
        for name in names:
            alternatives = [
                " ".join(self.rng.choice(names) for _ in range(self.rng.randint(2, 5)))
                for _ in range(self.rng.randint(1, 4))
            ]
            alternatives += [self._terminal() for _ in range(self.rng.randint(1, 3))]
            if self.rng.random() < 0.7:
                alternatives.append('""')
            self.rng.shuffle(alternatives)
            suffix = self.rng.choice(["", "", "", "?", "*", "+"])
            rules.append(f"{name}: " + " | ".join(a if '"' in a else f"({a}){suffix}" for a in alternatives))
        prefix = self.rng.choice(
            ["", "", '"a" ', "/[a-z ,]{3,9}/ ", f"/[a-z ,.]{{{self.rng.randint(10, 60)}}}/ ", '("a" | "b")* ']
        )
        return {"grammar": "\n".join([f"start: {prefix}s", *rules])}

    def _regex(self) -> dict[str, str]:
        n = self.rng.choice([10, 50, 200, 1000, 5000])
        part = self.rng.choice(
            ["(a?){N}", "(.*a){N}", "(.{0,N}){0,9}", "[a-z]{0,N}b", "((a|b|c)*d?){N}", ".*[a-f].{N}", "(.?.?){N}"]
        )
        return {"regex": self.rng.choice(["", "[a-z ]{5,20}"]) + part.replace("N", str(n))}

    def _schema(self, depth: int = 0) -> dict[str, str]:
        return {"json_schema": as_json(self._value(depth))}

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
    """Seconds of a request of the victim; its time-out where it fails."""
    answer = target.call("POST", path, tenant=VICTIM, body=body, timeout=VICTIM_SECONDS)
    return answer.seconds if answer.status == 200 else VICTIM_SECONDS


def _streaming(target: Target, fields: dict[str, Any]) -> Callable[[int], object]:
    """A load of streams of the attacker; each begins again when it ends."""
    body = as_json({"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, **fields}).encode()
    message = request_bytes("POST", "/complete", key=target.keys[ATTACKER], body=body)

    def action(_: int) -> None:
        with target.address.connect(timeout=20) as connection:
            connection.sendall(message)
            tail = b""
            while part := connection.recv(1 << 16):
                tail = tail[-20:] + part
                if b"event: done" in tail or b"event: error" in tail or b"HTTP/1.1 4" in tail:
                    return

    return action


class GrammarMasks(Attack):
    """Grammars whose masks take long, inside the step that all streams share."""

    name = "grammar-masks"
    share = 16.0
    streams: ClassVar[int] = 31

    def run(self, setting: Setting) -> None:
        target, report = setting.target, setting.report
        generator = GrammarGenerator(setting.rng)
        bomb = self._worst_of_many(setting, generator, setting.budget.share(0.4))
        found = measure_slowdown(
            lambda: self._worst_gap(target, 100),
            Load(_streaming(target, bomb), self.streams),
            baseline=Load(_streaming(target, {}), self.streams),
            budget=setting.budget.share(0.6),
        )
        limit = max(GRAMMAR_FACTOR * found.alone, found.alone + 0.05)
        report.worst = f"p99 gap {found.loaded * 1e3:.0f} ms, with plain streams {found.alone * 1e3:.0f} ms"
        report.limit = f"{limit * 1e3:.0f} ms"
        if found.loaded > limit:
            report.add("high", f"{self.streams} guided streams of another key: {report.worst}", as_json(bomb))

    @staticmethod
    def _worst_gap(target: Target, tokens: int) -> float:
        """The 99th percentile of the seconds between tokens of one plain stream of the victim."""
        body = {"prompt": "The old house", "max_tokens": tokens, "ignore_eos": True, "seed": 3}
        with open_stream(target.address, body, key=target.keys[VICTIM], timeout=VICTIM_SECONDS) as (_, events):
            return percentile(token_gaps(events), 0.99)

    def _worst_of_many(self, setting: Setting, generator: GrammarGenerator, budget: Budget) -> dict[str, str]:
        """Tries grammars concurrent with a short stream of the victim and keeps the one that costs it most."""
        worst, worst_gap = {"grammar": KNOWN_BOMB}, 0.0
        while budget and setting.report.tries < setting.most_tries:
            setting.report.tries += 1
            bomb = generator.next()
            with Load(_streaming(setting.target, bomb), 2):
                time.sleep(0.1)
                try:
                    gap = self._worst_gap(setting.target, 40)
                except OSError:
                    gap = VICTIM_SECONDS
            if gap > worst_gap:
                worst, worst_gap = bomb, gap
        return worst


class GrammarCompilation(Attack):
    """Costly regexes, schemas and grammars, each a new one, concurrent with another key's small ones."""

    name = "guide-compilation"
    share = 9.0

    def run(self, setting: Setting) -> None:
        generator, target, rng = GrammarGenerator(setting.rng), setting.target, setting.rng
        numbers = itertools.count()
        bombs = [generator.next() for _ in range(400)]

        def attack(index: int) -> None:
            number = next(numbers)
            grammar_fields = dict(bombs[(index * 37 + number) % len(bombs)])
            if "grammar" in grammar_fields:  # a comment makes it another text
                grammar_fields["grammar"] += f"\n// {number}"
            elif "regex" in grammar_fields:
                grammar_fields["regex"] += f"{number}?"
            body = {"prompt": "a", "max_tokens": 1, "stream": False, **grammar_fields}
            call(target.address, "POST", "/complete", key=target.keys[ATTACKER], body=body)

        def victim() -> float:
            regex = f"[a-z ]{{2,{rng.randint(3, 10**6) % 900 + 3}}}"
            return _waited(target, "/complete", {"prompt": "a", "max_tokens": 2, "stream": False, "regex": regex})

        _report_slowdown(setting, "small regex", victim, Load(attack, 20), repro=as_json(bombs[0]))


class LongTexts(Attack):
    """Texts of a megabyte to be tokenized, concurrent with another key's text of a few thousand characters."""

    name = "long-texts"
    share = 9.0

    def run(self, setting: Setting) -> None:
        target, rng = setting.target, setting.rng
        numbers = itertools.count()
        texts = [self._text(rng) for _ in range(8)]
        prompt = "It was a bright cold day in April. " * 186

        def attack(index: int) -> None:
            number = next(numbers)
            body = {"prompt": texts[(index + number) % len(texts)] + str(number)}
            route = "/tokenize" if index % 2 else "/complete"
            call(target.address, "POST", route, key=target.keys[ATTACKER], body=body, timeout=20)

        def victim() -> float:
            return _waited(target, "/tokenize", {"prompt": prompt})

        repro = "20 x POST /tokenize " + as_json({"prompt": texts[0][:40] + "... 1,000,000 characters"})
        _report_slowdown(setting, "text of 6,500 characters", victim, Load(attack, 20), repro=repro)

    @staticmethod
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


class ChatTemplates(Attack):
    """Conversations of thousands of messages, concurrent with another key's short one."""

    name = "chat-templates"
    share = 10.0
    needs_launcher = True

    def run(self, setting: Setting) -> None:
        launcher = setting.own_launcher
        weights = copied_weights(launcher, files={"chat_template.jinja": CHAT_TEMPLATE.encode()})
        with launcher.running(weights=weights) as target:

            def attack(_: int) -> None:
                body = self._conversation(setting.rng)
                call(target.address, "POST", "/v1/chat/completions", key=target.keys[ATTACKER], body=body, timeout=20)

            def victim() -> float:
                body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
                return _waited(target, "/v1/chat/completions", body)

            repro = as_json({"messages": "20,000 x {role: user, content: x}"})
            _report_slowdown(setting, "chat of one message", victim, Load(attack, 20), repro=repro)

    @staticmethod
    def _conversation(rng: Random) -> dict[str, Any]:
        count = rng.choice([2000, 5000, 20_000])
        content = rng.choice(["x", "{{ messages }}", "\u00e9" * 10, "a " * 10])
        return {
            "messages": [{"role": "user", "content": content * (400_000 // count // len(content) or 1)}] * count,
            "max_tokens": 1,
        }


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


class CostlyRequests(Attack):
    """Each kind of costly request of one key, concurrent with another key's shortest completion."""

    name = "costly-requests"
    share = 12.0
    threads: ClassVar[int] = 8

    def run(self, setting: Setting) -> None:
        target, report = setting.target, setting.report
        kinds = list(COSTLY)
        setting.rng.shuffle(kinds)
        body = {"prompt": "a", "max_tokens": 1, "stream": False}

        def victim() -> float:
            return _waited(target, "/complete", body)

        def plain(_: int) -> None:
            call(target.address, "POST", "/complete", key=target.keys[ATTACKER], body=body)

        worst = 0.0
        report.limit = "5 times that with plain requests"
        for kind in kinds:
            if not setting.budget or report.tries >= setting.most_tries:
                break
            path, fields = COSTLY[kind]
            bodies = [
                {"prompt": "a", **fields(setting.rng)} if path == "/complete" else fields(setting.rng) for _ in range(4)
            ]

            def attack(index: int, path: str = path, bodies: list[dict[str, Any]] = bodies) -> None:
                call(target.address, "POST", path, key=target.keys[ATTACKER], body=bodies[index % 4], timeout=20)

            budget = setting.budget.share(1 / len(kinds))
            found = measure_slowdown(
                victim, Load(attack, self.threads), budget=budget, baseline=Load(plain, self.threads)
            )
            report.tries += 1
            if found.is_excessive:
                figure = f"{found.loaded * 1e3:.0f} ms, with plain requests {found.alone * 1e3:.0f} ms"
                repro = f"{self.threads} x POST {path} {as_json(bodies[0])[:300]}"
                report.add("medium", f"{kind}: a token of another key takes {figure}", repro, group=kind)
            if found.loaded / found.limit > worst:
                worst = found.loaded / found.limit
                report.worst = f"{kind}: {found.loaded * 1e3:.0f} ms, with plain requests {found.alone * 1e3:.0f} ms"
            target.settle()


def _report_slowdown(setting: Setting, what: str, victim: Callable[[], float], load: Load, *, repro: str) -> None:
    report = setting.report
    found = measure_slowdown(victim, load, budget=setting.budget)
    report.tries = load.rounds
    report.worst = f"{what}: {found.loaded * 1e3:.0f} ms, alone {found.alone * 1e3:.0f} ms"
    report.limit = f"{found.limit * 1e3:.0f} ms"
    if found.is_excessive:
        report.add("high", f"another key's load slows a {report.worst}", repro)
