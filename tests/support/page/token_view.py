"""Tokens with their alternatives, as a server sends them, and the inspect view that shows them."""

import math

from tests.support.page.browser import DONE, generate, play

WORDS = [
    "the", "old", "ship", "sailed", "over", "a", "calm", "sea", "and", "few", "knew", "what", "wind", "would", "come",
]  # fmt: skip


def inspect(page):
    page.locator("#view-inspect").click()
    page.locator(".token").first.wait_for()


def token(page, content):
    return page.locator(".token").filter(has_text=content).first


def played(words):
    """Token events with their details: each word was the second of three."""
    return [("token", {"text": word, "tokens": [detail(word, token_id)]}) for token_id, word in enumerate(words, 1000)]


def detail(word, token_id):
    own = piece(word, token_id, 0.25)
    return {**own, "top": [piece(" other", token_id + 1, 0.5), own, piece(" third", token_id + 2, 0.125)]}


def piece(word, token_id, share):
    data = word if isinstance(word, bytes) else word.encode()
    return {
        "id": token_id,
        "text": data.decode("utf-8", "replace"),
        "bytes": list(data),
        "logprob": math.log(share),
    }


def stream(page, words, prompt="It is"):
    """The inspect view of a text whose end was streamed with these tokens."""
    page.locator("#document").fill(prompt)
    page.locator("#view-inspect").click()
    if prompt:
        page.locator(".token").first.wait_for()
    play(page, ("start", {"seed": 1}), *played(words), DONE)
    generate(page)
    page.locator(".token").nth(len(words) - (prompt == "")).wait_for()


def shows(page, words):
    """Waits until the inspect view shows this text and no other: it draws a frame later."""
    page.wait_for_function("(words) => document.querySelector('.tokens').textContent === words", arg=words)
