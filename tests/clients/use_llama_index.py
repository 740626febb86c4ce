"""llama-index-llms-openai-like: OpenAILike for a model that completes. Argument: the service."""

from __future__ import annotations

import sys

import httpx
from checks import raises, run_checks
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

URL = f"{sys.argv[1]}/v1"
PROMPT = "Once upon a time"
MODEL = httpx.get(f"{URL}/models", timeout=60).json()["data"][0]["id"]
ARGS = {"model": MODEL, "api_base": URL, "api_key": "none", "is_chat_model": False, "max_retries": 0, "max_tokens": 12}
llm = OpenAILike(**ARGS, temperature=0)


def check_complete() -> None:
    response = llm.complete(PROMPT)
    assert response.text and response.additional_kwargs["completion_tokens"] == 12


def check_stream_pieces_add_up_to_the_completion() -> None:
    responses = list(llm.stream_complete(PROMPT))
    assert "".join(response.delta for response in responses) == responses[-1].text == llm.complete(PROMPT).text


async def check_asynchronous_calls() -> None:
    responses = [response async for response in await llm.astream_complete(PROMPT)]
    assert responses[-1].text == (await llm.acomplete(PROMPT)).text


def check_log_probabilities() -> None:
    scored = OpenAILike(**ARGS, temperature=0, logprobs=True, top_logprobs=2).complete(PROMPT).logprobs
    assert len(scored) == 12 and all(token.logprob <= 0 for top in scored for token in top)


def check_a_chat_is_sent_as_a_prompt() -> None:
    assert llm.chat([ChatMessage(role="user", content="Who are you?")]).message.content


def check_native_fields_are_passed_on() -> None:
    other = OpenAILike(**ARGS, additional_kwargs={"seed": 7, "stop": ["."], "extra_body": {"top_k": 3, "min_p": 0.1}})
    assert other.complete(PROMPT).text == other.complete(PROMPT).text


def check_errors_are_raised() -> None:
    with raises(Exception, "top_p"):
        OpenAILike(**ARGS, additional_kwargs={"top_p": 7}).complete(PROMPT)


if __name__ == "__main__":
    run_checks(dict(vars()))
