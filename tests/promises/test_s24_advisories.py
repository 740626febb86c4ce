"""Published vulnerabilities of similar services and of libraries in use do not exist here: one test for each advisory.

Keys required by path prefix (vLLM #58144, #42594, #43426) are in test_s01, key comparison that leaks timing (vLLM
CVE-2025-59425) in test_s02, cross-site JSON forms (FastAPI CVE-2021-32677) in test_s09, DNS rebinding (Ollama
CVE-2024-28224) in test_s10, log injection (uvicorn CVE-2020-7694) in test_s12, the timing of a prefix cache that
tenants share (vLLM CVE-2025-46570) in test_s14, frames and weights that are unpickled (vLLM CVE-2024-11041,
CVE-2025-30165, CVE-2025-32444, CVE-2025-24357) in test_s15, request smuggling (CL.TE, TE.CL, two lengths) in test_s25.

Advisories about features that inkstream lacks are left out: images and video, tools, LoRA, several machines, GGUF,
files by URL, multipart forms, WebSockets, h11.
"""

from __future__ import annotations

import functools
import itertools
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.chat.template_client import RenderJob
from app.chat.template_worker import render
from app.engine.scheduling.prefix_cache import chain_hash
from tests.support import ROOT
from tests.support.keyed_server import raw_request, send_raw, status_of
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

Check = Callable[[Server], None]
TEXT: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 3, "stream": False}
HOST = "Host: localhost"
ENDPOINTS = ("/complete", "/v1/completions")
PAYLOAD = "{{ lipsum.__globals__['os'].popen('echo pwned').read() }}"


@pytest.fixture(scope="module")
def target(serve_module: Services, tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Server:
    """A real engine, whose weights have a chat template."""
    folder = tmp_path_factory.mktemp("target")
    copy = Path(shutil.copytree(weights, folder / "tiny"))
    (copy / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return serve_module("--dtype", "float32", weights=copy)


def _post(server: Server, path: str = "/complete", **fields: Any) -> httpx.Response:
    body = {**TEXT, **fields} if path in ENDPOINTS else fields
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def _within(seconds: float, check: Callable[[], object]) -> None:
    """The fastest of three runs counts: a slow request is always slow, a stalled machine is not."""

    def measure() -> float:
        began = time.monotonic()
        check()
        return time.monotonic() - began

    assert any(measure() < seconds for _ in range(3))


def _answers(
    *cases: dict[str, Any],
    statuses: tuple[int, ...] = (200, 400),
    paths: tuple[str, ...] = ENDPOINTS,
    seconds: float = 60,
) -> Check:
    """Return a check that each request gets one of these statuses in time."""

    def ask(server: Server, path: str, fields: dict[str, Any]) -> None:
        answer = _post(server, path, **fields)
        assert answer.status_code in statuses, (path, str(fields)[:100], answer.text[:300])

    def check(server: Server) -> None:
        for path, fields in itertools.product(paths, cases):
            _within(seconds, functools.partial(ask, server, path, fields))

    return check


def _values(name: str, *values: Any) -> list[dict[str, Any]]:
    return [{name: value} for value in values]


def _all_of(*checks: Check) -> Check:
    def check(server: Server) -> None:
        for each in checks:
            each(server)

    return check


_OUTSIDE = (320, 99999, 2**31 - 1)
_BEYOND = (*_OUTSIDE, 2**31, 2**63, -1)
_LOGIT_BIAS = [{"logit_bias": {str(token): 5}} for token in _BEYOND]
_ids_outside = _all_of(
    _answers(
        *_LOGIT_BIAS, {"logit_bias": {"AI": -100}}, *_values("prompt", *([5, t] for t in _BEYOND)), statuses=(400,)
    ),
    _answers(*_values("stop_token_ids", *([token] for token in _OUTSIDE))),
)
_ODD = {
    "temperature": (5e-324, 1e-308, 1e-30, 10, 10.001, -0.0),
    "repetition_penalty": (5e-324, 1e-308, 1e308, 0, -1),
    "top_p": (5e-324, 1 - 1e-16, 0, 1.0000001),
    "typical_p": (5e-324, 1, 0),
    "min_p": (5e-324, 1),
    "top_k": (-1, 0, 1, 2**31 - 1, -2, 2**31),
    "seed": (-(2**63), 2**63 - 1, 2**63),
    "presence_penalty": (-2, 2, 2.001),
    "min_tokens": (0, 3, 4, 2**31),
    "truncate_prompt_tokens": (0, 1, 2**31 - 1),
    "deadline_ms": (0, 600_000, 600_001),
    "logprobs": (0, 20, 21, -1),
}
_UP, _DOWN = ({str(i): bias for i in range(300)} for bias in (100, -100))
_odd_parameters = _all_of(
    _answers(*(case for name, values in _ODD.items() for case in _values(name, *values)), paths=("/complete",)),
    _answers({"temperature": 1e-308, "repetition_penalty": 1e308, "logit_bias": _UP}),
    _answers({"logit_bias": _DOWN, "min_tokens": 3, "top_k": 1, "top_p": 0, "min_p": 1}),
)
_IDS = [list(range(5, 205))] * 4
_prompt_logprobs = _all_of(  # [tokens, vocabulary] of log-probabilities is never in memory at once
    _answers({"prompt": _IDS, "echo": True, "logprobs": 20, "max_tokens": 0}),
    _answers({"prompt": _IDS, "logprobs": 20}, paths=("/score",), statuses=(200,)),
)
_MANY = (65, 10**6, 2**31, 10**30)
_wide = _all_of(
    _answers(*_values("n", *_MANY), statuses=(400,), seconds=5),
    _answers(*_values("best_of", *_MANY), statuses=(400,), paths=("/v1/completions",)),
    _answers({"prompt": ["x"] * 1025}, statuses=(400,), paths=("/complete",)),
    _answers({"prompt": ["x"] * 1024, "n": 16}, statuses=(400, 503), paths=("/complete",)),
)
_invalid_grammars = _answers(
    *_values("regex", "(", "[z-a]", "\\", "a{5,2}", "(?<=a)b", "\\p{Nope}"),
    *_values("json_schema", {"type": "nonsense"}, {"type": "string", "pattern": "("}, "{", {"properties": []}),
    *_values("json_schema", {"$ref": "#/a"}, {"type": {}}),
    *_values("grammar", "start:", "", "start: start", 'start: "a" | missing'),
)
_NESTED: dict[str, Any] = functools.reduce(lambda inner, _: {"type": "array", "items": inner}, range(200), {})
_RULES = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60))
_endless_grammars = _answers(
    *_values("regex", "((a{1,1000}){1,1000}){1,1000}", "(a|a)*" * 500, "(" * 5000 + ")" * 5000),
    *_values("grammar", f'start: r0\n{_RULES}\nr60: "a"', 'start: ("a" | start)*'),
    {"json_schema": _NESTED},
    seconds=20,
)
_NO_JSON = [
    b'{"prompt": "\\ud800", "max_tokens": 1}',
    *(b'{"prompt": "x", "temperature": %b}' % number for number in (b"NaN", b"1e999", b"Infinity")),
    b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    *(b"[" * 100_000, b'{"prompt":' * 50_000, b'{"prompt": "\xff\xfe"}', b'{"prompt": "x"}{}', b'{"prompt": "x",}'),
    *(b"", b"null", b"1", b'"x"', b"[]", b'\xef\xbb\xbf{"prompt": "x"', b'{"prompt": "x\x00"}'),
    b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"json_schema": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b', "prompt": "x"}',
]
_ODD_TEXTS = (
    "\x00",
    "\ufffe\uffff",
    "\U0010ffff" * 50,
    "a\u0300" * 100,
    "\u202e\u2066",
    "\r\n\x85\u2028",
    "\ufdfa" * 30,
)


def _odd_json(server: Server) -> None:
    for path in (*ENDPOINTS, "/v1/chat/completions", "/score", "/tokenize", "/detokenize"):
        for content in _NO_JSON:
            headers = {"Content-Type": "application/json"}
            answer = httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=60)
            assert answer.status_code == 400, (path, content[:50], answer.text[:300])
            error = answer.json()["error"]
            assert error["type"] == "invalid_request_error", (path, content[:50])
            assert error["request_id"] == answer.headers["x-request-id"]
    _answers(*_values("prompt", *_ODD_TEXTS))(server)


def _long_prompts(server: Server) -> None:
    for path in (*ENDPOINTS, "/score") * 5:
        answer = _post(server, path, prompt="x " * 5000)
        assert answer.json()["error"]["code"] == "context_length_exceeded"


_SCORED = {"echo": True, "max_tokens": 0, "logprobs": 1}
_empty_prompts = _answers(*_values("prompt", "", [], [""], [[]], ["", "x"], None), _SCORED, {**_SCORED, "prompt": ""})


def _template_of_a_client(server: Server) -> None:
    """Chat templates come from the weights, never from a request."""
    chat = {"messages": [{"role": "user", "content": PAYLOAD}], "max_tokens": 1}
    assert _post(server, "/v1/chat/completions", **chat).status_code == 200
    endless = "{% for i in range(10**9) %}{% for j in range(10**9) %}x{% endfor %}{% endfor %}"
    for field, value in (
        ("chat_template", endless),
        ("chat_template", PAYLOAD),
        ("chat_template_kwargs", {"chat_template": endless}),
        ("chat_template_kwargs", {"messages": [], "tokenize": True, "x": "y" * 10_000}),
        ("documents", [{"text": endless}]),
    ):
        request = {**chat, field: value}
        _within(5, functools.partial(_post, server, "/v1/chat/completions", **request))
        answer = _post(server, "/v1/chat/completions", **request)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text


def _weights_template(_server: Server) -> None:
    for source in (PAYLOAD, "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.__init__.__globals__ }}"):
        rendered = render(RenderJob(source=source, variables={"messages": []}))
        assert rendered.error or ("pwned" not in rendered.text and "class" not in rendered.text), rendered


def _ranges(server: Server) -> None:
    for spec in (",".join(f"{i}-{i}" for i in range(0, 6000, 2))[:7000], "9" * 7000, "-" * 7000, "0-" + ",0-" * 2000):
        request = raw_request("GET", "/web/style.css", HOST, f"Range: bytes={spec}")
        _within(2, functools.partial(send_raw, server.url, request))


def _content_types(server: Server) -> None:
    form = 'application/x-www-form-urlencoded; !="' + "\\" * 6000

    def ask(kind: str) -> None:
        answer = send_raw(server.url, raw_request("POST", "/complete", HOST, f"Content-Type: {kind}", body=b"x=1"))
        assert status_of(answer) in (400, 415, 431), answer

    for kind in (form, "multipart/form-data; boundary=" + "x" * 6000, "a" * 7000):
        _within(2, functools.partial(ask, kind))


def _paths_outside(server: Server) -> None:
    secret = (ROOT / "app/server.py").read_bytes()[:60]
    paths = ["../server.py", "..%2fserver.py", "%2e%2e/server.py", "%2e%2e%2fserver.py", "..%5cserver.py"]
    paths += ["/etc/passwd", "....//server.py", "main.js%00.py", "main.js/../../server.py"]
    for path in [*paths, "%c0%ae%c0%ae/server.py"]:
        answer = send_raw(server.url, raw_request("GET", f"/web/{path}", HOST))
        assert status_of(answer) in (400, 404) and secret not in answer and b"root:" not in answer, path
    for name in ("../tiny", "/etc/passwd", "../../../../etc/passwd", "/nonexistent", "..%2ftiny"):
        assert _post(server, "/v1/completions", model=name).status_code == 404


def _split_headers(server: Server) -> None:
    for target in ("/%0d%0aSet-Cookie:%20a=b", "/web/%0d%0aSet-Cookie:%20a=b", "/v1/models/%0d%0aSet-Cookie:%20a=b"):
        answer = send_raw(server.url, raw_request("GET", target, HOST, "Last-Event-ID: x\tSet-Cookie: a=b"))
        assert b"set-cookie" not in answer.lower().partition(b"\r\n\r\n")[0]
    values = ("a\r\nSet-Cookie: a=b", "a\nb", "a b", "\x00", "a" * 65, "../a", "<b>")
    _answers(*_values("request_id", *values), statuses=(400,))(server)
    for value in values:
        response = _post(server, user=value)
        assert response.status_code == 200 and "set-cookie" not in response.headers


ADVISORIES: dict[str, Check] = {
    "token ids outside the vocabulary: vLLM #5822, #5963, #6866, #16529": _ids_outside,
    "parameters that crash an engine: vLLM #5903, #54195, #55164": _odd_parameters,
    "log-probabilities of long prompts: vLLM #5907, #38830": _prompt_logprobs,
    "empty prompts without tokens to generate: vLLM CVE-2024-8768, #6521": _empty_prompts,
    "unbounded n and best_of: vLLM CVE-2024-8939, CVE-2026-34756": _wide,
    "invalid grammars: vLLM CVE-2025-48942, CVE-2025-48943, CVE-2025-48944": _invalid_grammars,
    "grammars that never end: xgrammar CVE-2025-57809, CVE-2025-58446": _endless_grammars,
    "invalid JSON: Python CVE-2020-10735, lone surrogates, NaN, nesting": _odd_json,
    "repeated prompts beyond the context: llama.cpp b8330": _long_prompts,
    "templates in requests: vLLM CVE-2025-61620, GHSA-4hhp-h66f-j5j7": _template_of_a_client,
    "templates that escape their sandbox: llama-cpp-python CVE-2024-34359, SGLang CVE-2026-5760": _weights_template,
    "range requests: Starlette CVE-2025-62727": _ranges,
    "content types that are slow to parse: python-multipart CVE-2024-24762, Starlette CVE-2024-47874": _content_types,
    "files outside the static folder: Starlette CVE-2023-29159, Ollama CVE-2024-37032, CVE-2024-39722": _paths_outside,
    "header injection: uvicorn CVE-2020-7695": _split_headers,
}


@pytest.mark.parametrize("advisory", ADVISORIES)
def test_advisory_does_not_apply(target: Server, advisory: str, promise: Promise) -> None:
    ADVISORIES[advisory](target)
    assert target.process.poll() is None and target.metric("engine_restarts_total") == 0, "no process may restart"
    assert _post(target).status_code == 200
    assert not re.search(r'"level": "(error|critical)"', target.log.read_text())
    promise.all_of(advisory.partition(":")[0], 1, 1)


def test_prefix_cache_uses_a_collision_resistant_hash() -> None:
    """vLLM GHSA-rm76-4mrf-v9r8 (CVE-2025-25183) used Python's hash()."""
    source = Path(chain_hash.__code__.co_filename).read_text()
    assert "sha256" in source and not re.search(r"[^_.a-z]hash\(", source)
