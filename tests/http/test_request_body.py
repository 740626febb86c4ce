"""Lists and objects in bodies are counted correctly next to any strings, and counting is fast for any input."""

from __future__ import annotations

import json
import time

import pytest

from app.http.request_body import MAX_CONTAINERS, has_too_many_containers


@pytest.mark.parametrize(
    ("value", "is_too_many"), [([[]] * (MAX_CONTAINERS - 1), False), ([{}] * MAX_CONTAINERS, True)]
)
def test_lists_and_objects_in_a_body_are_counted(value: object, is_too_many: bool) -> None:
    assert has_too_many_containers(json.dumps(value).encode()) == is_too_many


def test_brackets_in_strings_do_not_count() -> None:
    text = 'she said "[{" \\ ' * MAX_CONTAINERS
    assert not has_too_many_containers(json.dumps({"prompt": text, '["': [text]}).encode())


@pytest.mark.parametrize("end", [b'"', b"\\", b'"\\', b"", b"["])
@pytest.mark.parametrize("part", [b'\\"', b'"', b"\\\\", b'"\\', b"[", b'["'])
def test_counting_takes_linear_time(part: bytes, end: bytes) -> None:
    body = b'"' + part * 500_000 + b"[" * MAX_CONTAINERS + end
    start = time.process_time()
    has_too_many_containers(body)
    assert time.process_time() - start < 2
