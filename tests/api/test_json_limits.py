"""Lists and objects in bodies are counted correctly next to any strings, and counting is fast for any input."""

from __future__ import annotations

import json
import time

import pytest

from app.api.dependencies import MOST_PARTS, has_too_many_parts


@pytest.mark.parametrize(("value", "is_too_many"), [([[]] * (MOST_PARTS - 1), False), ([{}] * MOST_PARTS, True)])
def test_lists_and_objects_are_counted(value: object, is_too_many: bool) -> None:
    assert has_too_many_parts(json.dumps(value).encode()) == is_too_many


def test_brackets_in_texts_do_not_count() -> None:
    text = 'she said "[{" \\ ' * MOST_PARTS
    assert not has_too_many_parts(json.dumps({"prompt": text, '["': [text]}).encode())


@pytest.mark.parametrize("end", [b'"', b"\\", b'"\\', b"", b"["])
@pytest.mark.parametrize("part", [b'\\"', b'"', b"\\\\", b'"\\', b"[", b'["'])
def test_counting_takes_no_longer_than_the_body_is_long(part: bytes, end: bytes) -> None:
    body = b'"' + part * 500_000 + b"[" * MOST_PARTS + end
    start = time.process_time()
    has_too_many_parts(body)
    assert time.process_time() - start < 2
