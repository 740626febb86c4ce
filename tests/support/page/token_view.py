"""Tokens with alternatives, as the server sends them, and helpers for the inspect view."""

import math

from tests.support.page.browser import DONE, fake_completion, generate

WORDS = [
    "the", "old", "ship", "sailed", "over", "a", "calm", "sea", "and", "few", "knew", "what", "wind", "would", "come",
]  # fmt: skip


def open_inspect_view(page):
    page.locator("#view-inspect").click()
    page.locator(".token").first.wait_for()


def find_token(page, content):
    return page.locator(".token").filter(has_text=content).first


def token_events(words):
    """Token events in which each word ranks second of three alternatives."""
    return [
        ("token", {"text": word, "tokens": [make_ranked_token(word, token_id)]})
        for token_id, word in enumerate(words, 1000)
    ]


def make_ranked_token(word, token_id):
    own = make_token(word, token_id, 0.25)
    return {**own, "top": [make_token(" other", token_id + 1, 0.5), own, make_token(" third", token_id + 2, 0.125)]}


def make_token(word, token_id, probability):
    data = word if isinstance(word, bytes) else word.encode()
    return {
        "id": token_id,
        "text": data.decode("utf-8", "replace"),
        "bytes": list(data),
        "logprob": math.log(probability),
    }


def stream_into_inspect_view(page, words, prompt="It is"):
    """Opens the inspect view on `prompt`, and streams these tokens into it."""
    page.locator("#document").fill(prompt)
    page.locator("#view-inspect").click()
    if prompt:
        page.locator(".token").first.wait_for()
    fake_completion(page, ("start", {"seed": 1}), *token_events(words), DONE)
    generate(page)
    page.locator(".token").nth(len(words) - (prompt == "")).wait_for()


def wait_for_inspected_text(page, words):
    """Waits until the inspect view shows exactly this text: it draws a frame late."""
    page.wait_for_function("(words) => document.querySelector('.tokens').textContent === words", arg=words)
