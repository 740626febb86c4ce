"""The openai package, 3.x and 2.x: all its completion features. Arguments: the service, one that takes two requests."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import openai
from checks import raises, run_checks

URL, BUSY = sys.argv[1:3]
PROMPT = "Once upon a time"
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
MODEL = client.models.list().data[0].id


def complete(**fields: Any) -> Any:
    """A completion or a stream."""
    return client.completions.create(**{"model": MODEL, "prompt": PROMPT, **fields})


def text(**fields: Any) -> str:
    """The text of a completion with one choice."""
    return complete(**fields).choices[0].text


def streamed(**fields: Any) -> str:
    """The text of a streamed completion."""
    return "".join(chunk.choices[0].text for chunk in complete(**fields, stream=True))


def check_the_model_is_listed_and_found() -> None:
    assert client.models.retrieve(MODEL).id == MODEL
    with raises(openai.NotFoundError, "nowhere"):
        client.models.retrieve("nowhere")


def check_a_plain_completion() -> None:
    answer = complete(max_tokens=8, temperature=0)
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion" and answer.model == MODEL
    assert abs(answer.created - time.time()) < 60
    assert answer.choices[0].text and answer.choices[0].finish_reason == "length" and not answer.choices[0].logprobs
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def check_the_default_is_sixteen_tokens() -> None:
    answer = complete(extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def check_stream_pieces_add_up_to_the_plain_completion() -> None:
    request = {"max_tokens": 40, "seed": 7}
    plain = complete(**request)
    chunks = list(complete(**request, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.choices[0].text
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == plain.choices[0].finish_reason
    assert all(chunk.choices[0].text for chunk in chunks[:-1])
    assert not any(chunk.usage for chunk in chunks)


async def check_an_asynchronous_stream() -> None:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as aclient:
        stream = await aclient.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, seed=7, stream=True)
        pieces = [chunk.choices[0].text async for chunk in stream]
    assert "".join(pieces) == text(max_tokens=12, seed=7)


def check_the_last_chunk_has_the_usage() -> None:
    request = {"max_tokens": 8, "temperature": 0}
    chunks = list(complete(**request, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage == complete(**request).usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert not any(chunk.usage for chunk in chunks[:-1])


def check_continuous_usage_counts_up() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(max_tokens=8, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] <= 8 and counts[0] >= 1


def check_several_choices_of_several_prompts_keep_their_order() -> None:
    prompts = [PROMPT, "The moon", "It was"]
    answer = complete(prompt=prompts, n=2, max_tokens=6, seed=3, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    for choice in answer.choices:
        assert choice.text.startswith(prompts[choice.index // 2])
    assert answer.usage.completion_tokens <= 36
    texts = [""] * 6
    for chunk in complete(prompt=prompts, n=2, max_tokens=6, seed=3, echo=True, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in answer.choices]


def check_best_of_returns_one_of_its_samples() -> None:
    request = {"max_tokens": 6, "seed": 3}
    answer = complete(**request, n=1, best_of=3)
    assert len(answer.choices) == 1
    assert answer.choices[0].text in {choice.text for choice in complete(**request, n=3).choices}
    with raises(openai.BadRequestError, "best_of"):
        complete(**request, n=3, best_of=2)
    with raises(openai.BadRequestError, "best_of"):
        complete(**request, best_of=3, stream=True)


def check_log_probabilities_in_the_legacy_format() -> None:
    request = {"max_tokens": 10, "temperature": 0, "logprobs": 3}
    choice = complete(**request).choices[0]
    logprobs = choice.logprobs
    assert (
        len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.text_offset)
    )
    assert "".join(logprobs.tokens) == choice.text and logprobs.text_offset[0] == 0
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert logprob <= 0 and top[token] == logprob == max(top.values()) and len(top) <= 4
    parts = [chunk.choices[0] for chunk in complete(**request, stream=True)]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [x for part in parts if part.logprobs for x in getattr(part.logprobs, field)]
        assert streamed == getattr(logprobs, field), field
    assert all(len(part.logprobs.tokens) == 1 for part in parts if part.logprobs and part.logprobs.tokens)


def check_echo_returns_the_prompt_and_its_log_probabilities() -> None:
    answer = complete(max_tokens=2, temperature=0, logprobs=2, echo=True)
    choice, logprobs = answer.choices[0], answer.choices[0].logprobs
    n = answer.usage.total_tokens
    assert choice.text.startswith(PROMPT) and "".join(logprobs.tokens) == choice.text
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == n
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert all(math.isfinite(x) and x <= 0 for x in logprobs.token_logprobs[1:])
    assert [choice.text[i:].startswith(t) for i, t in zip(logprobs.text_offset, logprobs.tokens, strict=True)] == [
        True
    ] * n
    scored = complete(max_tokens=0, logprobs=2, echo=True).choices[0]
    assert scored.text == PROMPT and scored.logprobs.token_logprobs == logprobs.token_logprobs[:-2]


def check_prompts_may_be_token_ids() -> None:
    request = {"max_tokens": 4, "temperature": 0, "echo": True}
    one, two = ([5, 6, 7], [8, 9])
    texts = [complete(**request, prompt=ids).choices[0].text for ids in (one, two)]
    assert [choice.text for choice in complete(**request, prompt=[one, two]).choices] == texts
    assert complete(prompt=[one, two], max_tokens=1).usage.prompt_tokens == 5


def check_the_completion_ends_before_a_stop() -> None:
    request = {"max_tokens": 30, "temperature": 0}
    whole = text(**request)
    stop = whole[len(whole) // 2 :][:3]
    choice = complete(**request, stop=[stop, "never in this text"]).choices[0]
    assert choice.text == whole[: whole.index(stop)] and choice.finish_reason == "stop"
    assert streamed(**request, stop=stop) == choice.text


def check_a_logit_bias_is_applied() -> None:
    answer = complete(max_tokens=3, temperature=0, logit_bias={"42": 100}, logprobs=0)
    assert len(set(answer.choices[0].logprobs.tokens)) == 1


def check_output_follows_a_schema_streamed_or_not() -> None:
    schema = {"type": "object", "properties": {"age": {"enum": [7, 8]}}, "required": ["age"]}
    schema["additionalProperties"] = False
    shape = {"type": "json_schema", "json_schema": {"name": "fox", "schema": schema}}
    request = {"max_tokens": 60, "seed": 3, "extra_body": {"response_format": shape}}
    assert json.loads(text(**request))["age"] in (7, 8)
    assert streamed(**request) == text(**request)


def check_unknown_fields_are_named_in_warnings() -> None:
    answer = complete(max_tokens=1, extra_body={"my_label": 2})
    assert "my_label" in str(answer.model_extra["warnings"])


def check_null_means_the_default() -> None:
    nulls = ("best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty")
    nulls += ("seed", "stop", "stream", "stream_options", "suffix", "temperature", "top_p", "user")
    answer = complete(extra_body=dict.fromkeys(nulls))
    assert 1 <= answer.usage.completion_tokens <= 16
    assert complete(prompt=None, max_tokens=2).choices


def check_fields_that_benchmarks_send() -> None:
    extra = {"repetition_penalty": 1.0, "ignore_eos": True, "min_tokens": 5, "top_k": -1, "best_of": 1}
    request = {"max_tokens": 5, "temperature": 0.0, "logprobs": None, "extra_body": extra}
    chunks = list(complete(**request, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == 5


def check_invalid_values_are_bad_requests() -> None:
    for wrong in ({"temperature": -1}, {"n": 0}, {"logprobs": 99}, {"max_tokens": "many"}, {"stop": ["x"] * 65}):
        with raises(openai.BadRequestError, next(iter(wrong))) as caught:
            complete(**wrong)
        assert caught[0].param == next(iter(wrong)) and caught[0].type == "invalid_request_error"
        assert caught[0].request_id == caught[0].body["request_id"]
    with raises(openai.BadRequestError) as caught:
        complete(prompt="word " * 9000)
    assert caught[0].code == "context_length_exceeded"
    with raises(openai.BadRequestError):
        complete(temperature=-1, stream=True)
    with raises(openai.NotFoundError, "nowhere"):
        client.completions.create(model="nowhere", prompt=PROMPT)


def check_a_chat_without_a_template_is_refused() -> None:
    with raises(openai.BadRequestError, "template"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Who are you?"}])


def check_the_raw_response_names_the_request() -> None:
    raw = client.completions.with_raw_response.create(model=MODEL, prompt=PROMPT, max_tokens=1)
    assert raw.headers["x-request-id"] and raw.parse()._request_id == raw.headers["x-request-id"]
    with client.completions.with_streaming_response.create(model=MODEL, prompt=PROMPT, max_tokens=1) as response:
        assert response.headers["x-request-id"] and response.json()["choices"]


def check_a_client_may_close_its_stream() -> None:
    with complete(max_tokens=200, stream=True) as stream:
        next(iter(stream))
    assert complete(max_tokens=1).choices


def check_a_full_service_refuses_and_the_client_retries() -> None:
    request = {"model": MODEL, "prompt": PROMPT}
    with busy_streams() as end:
        refused = openai.OpenAI(base_url=f"{BUSY}/v1", api_key="none", max_retries=0)
        with raises(openai.InternalServerError) as caught:
            refused.completions.create(**request, max_tokens=1)
        assert caught[0].status_code == 503 and caught[0].type == "unavailable_error"
        assert 1 <= int(caught[0].response.headers["retry-after"]) <= 120
        hooks = {"response": [lambda answer: end() if answer.status_code == 503 else None]}
        http_client = httpx.Client(event_hooks=hooks)
        patient = openai.OpenAI(base_url=f"{BUSY}/v1", api_key="none", max_retries=4, http_client=http_client)
        raw = patient.completions.with_raw_response.create(**request, max_tokens=1)
        assert raw.parse().choices and raw.retries_taken >= 1


def check_a_rate_limit_is_retried_after_the_given_time() -> None:
    with refusing_once(429) as url:
        started = time.monotonic()
        other = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=1)
        assert other.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1).choices
        assert time.monotonic() - started >= 1


@contextmanager
def busy_streams() -> Iterator[Callable[[], object]]:
    """Occupies the busy service with one running and one waiting request; yields a function that ends both."""
    filling = openai.OpenAI(base_url=f"{BUSY}/v1", api_key="none", max_retries=0)
    request = {"model": MODEL, "prompt": PROMPT, "max_tokens": 100_000, "extra_body": {"ignore_eos": True}}
    request["stream"] = True
    first = filling.completions.create(**request)
    next(iter(first))
    # A queued stream has no first chunk yet; its headers show that it was admitted.
    second = filling.completions.create(**request)
    try:
        yield lambda: (first.close(), second.close())
    finally:
        first.close()
        second.close()


@contextmanager
def refusing_once(status: int) -> Iterator[str]:
    """A service that refuses the first request with Retry-After: 1, then responds; the tests' keys have no quota."""
    responses = [(status, {"error": {"message": "slow down", "type": "rate_limit_error"}})]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            choice = {"index": 0, "text": "x", "finish_reason": "length", "logprobs": None}
            whole = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}
            code, body = responses.pop() if responses else (200, whole)
            data = json.dumps(body).encode()
            self.send_response(code)
            for name, value in (("Retry-After", "1"), ("Content-Type", "application/json")):
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


if __name__ == "__main__":
    run_checks(dict(vars()))
