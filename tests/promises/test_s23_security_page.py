"""SECURITY.md says who the attacker is, what is a vulnerability here and what is not, and how to report one."""

from __future__ import annotations

import re

from tests.support import ROOT
from tests.support.promise_figures import Promise

PAGE = (ROOT / "SECURITY.md").read_text()
SECTIONS = {
    "Reporting": ("private", "week", "CHANGELOG"),
    "Supported versions": ("newest",),
    "What is protected, and from whom": (
        "web page",
        "stranger on the network",
        "holder of one key",
        "author of a weights directory",
        "**Trusted:**",
    ),
    "Threats by resource": ("event loop", "prefix cache timing", "supply chain", "what is left"),
    "Shared resources": ("S26", "event loop", "grammar processes", "engine step", "quota"),
    "What is a vulnerability": ("- A route that answers without a key", "weights directory"),
    "What is not": ("--insecure-no-auth", "What the model says"),
    "What is not defended": ("TLS", "many addresses", "without keys", "Stolen keys"),
    "Hardening": ("1. ", "read-only root", "requirements.lock"),
    "What is tested": ("RELIABILITY.md",),
}


def _sections(page: str) -> dict[str, str]:
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_security_page_is_complete(promise: Promise) -> None:
    found = _sections(PAGE)
    good = [name for name, words in SECTIONS.items() if all(word in found.get(name, "") for word in words)]
    promise.all_of("required sections of SECURITY.md that are complete", len(good), len(SECTIONS))
    assert list(found) == list(SECTIONS)


def test_missing_sections_are_detected() -> None:
    """Control."""
    for name in SECTIONS:
        assert list(_sections(PAGE.replace(f"## {name}\n", ""))) != list(SECTIONS)
