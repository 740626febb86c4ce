"""S33: No request field is accepted and ignored: each is honored, without effect by nature, or refused.

Every row of the table in docs/api.md is sent to both OpenAI endpoints of a running service.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.openai.request_fields import CHAT, COMPLETIONS, OtherField, fields_of
from tests.support.model.tiny_models import tiny_weights
from tests.support.promise_figures import Promise
from tests.support.request_fields import BASE, HONORED, PATHS, TEMPLATE
from tests.support.services import Services

pytestmark = pytest.mark.slow

_ASKING: tuple[Any, ...] = (0.5, "x", {"a": 1}, [1])
_EMPTY: tuple[Any, ...] = (None, "", [], {})


@pytest.fixture(scope="module")
def client(serve_module: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    weights = tiny_weights(tmp_path_factory.mktemp("fields") / "tiny")
    Path(weights / "chat_template.jinja").write_text(TEMPLATE)
    with httpx.Client(base_url=serve_module(weights=weights, fake_ms=0.1).url, timeout=60) as client:
        yield client


def _post(client: httpx.Client, endpoint: str, **fields: Any) -> httpx.Response:
    return client.post(PATHS[endpoint], json={**BASE[endpoint], "seed": 3, **fields})


def _behaves(client: httpx.Client, endpoint: str, name: str, field: OtherField) -> bool:
    """Whether values that ask for nothing change nothing, and others are refused by name, with what to do instead."""
    plain = _post(client, endpoint).json()
    if not field.is_refused:
        answers = [_post(client, endpoint, **{name: value}) for value in (*_EMPTY, *_ASKING)]
        return all(a.status_code == 200 and a.json()["choices"] == plain["choices"] for a in answers)
    for value in (*_EMPTY, *field.neutral):
        answer = _post(client, endpoint, **{name: value})
        if answer.status_code != 200 or answer.json()["choices"] != plain["choices"] or "warnings" in answer.json():
            return False
    for value in _ASKING:
        answer = _post(client, endpoint, **{name: value})
        error = answer.json().get("error", {})
        if answer.status_code != 400 or error["param"] != name or field.instead not in error["message"]:
            return False
    return True


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_each_field_of_the_table_is_treated_as_it_says(client: httpx.Client, promise: Promise, endpoint: str) -> None:
    table = fields_of(endpoint)
    wrong = [name for name, field in table.items() if not _behaves(client, endpoint, name, field)]
    assert wrong == []
    promise.all_of(
        f"fields of other servers on {PATHS[endpoint]}, treated as said", len(table) - len(wrong), len(table)
    )


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_honored_fields_are_accepted(client: httpx.Client, promise: Promise, endpoint: str) -> None:
    tried = HONORED[endpoint]
    answers = {name: _post(client, endpoint, **{name: value}) for name, value in tried.items()}
    answers.pop("suffix", None)  # the tiny vocabulary has no tokens to fill in the middle
    assert {name: answer.text for name, answer in answers.items() if answer.status_code != 200} == {}
    assert [name for name, answer in answers.items() if '"warnings"' in answer.text] == []
    promise.all_of(
        f"honored fields of {PATHS[endpoint]}, accepted without a warning",
        len(answers),
        len(tried) - ("suffix" in tried),
    )


def test_a_table_that_says_otherwise_is_noticed(client: httpx.Client) -> None:
    """Control: the check fails for a field that is honored, and for one that is refused for another reason."""
    assert not _behaves(client, COMPLETIONS, "n", OtherField(names=("n",)))
    assert not _behaves(client, COMPLETIONS, "mirostat", OtherField(names=("mirostat",), instead="send nothing"))
