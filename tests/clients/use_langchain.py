"""langchain-openai: its completion class, OpenAI. Argument: the service."""

from __future__ import annotations

import sys

import httpx
from checks import raises, run_checks
from langchain_openai import OpenAI

URL = f"{sys.argv[1]}/v1"
PROMPT = "Once upon a time"
MODEL = httpx.get(f"{URL}/models", timeout=60).json()["data"][0]["id"]
ARGS = {"model": MODEL, "base_url": URL, "api_key": "none", "max_retries": 0, "max_tokens": 12, "seed": 7}
llm = OpenAI(**ARGS)


def check_invoke() -> None:
    assert llm.invoke(PROMPT)
    assert llm.invoke(PROMPT) == llm.invoke(PROMPT)


def check_stream_pieces_add_up_to_the_completion() -> None:
    pieces = list(llm.stream(PROMPT))
    assert len(pieces) > 3 and "".join(pieces) == llm.invoke(PROMPT)


async def check_asynchronous_calls() -> None:
    assert "".join([piece async for piece in llm.astream(PROMPT)]) == await llm.ainvoke(PROMPT)


def check_a_batch_keeps_its_order() -> None:
    greedy = OpenAI(**ARGS, temperature=0)
    prompts = [f"Chapter {i}. The" for i in range(24)]  # two requests: langchain sends twenty prompts in one
    assert greedy.batch(prompts) == [greedy.invoke(prompt) for prompt in prompts]


def check_several_choices_and_their_usage() -> None:
    result = OpenAI(**ARGS, n=2, best_of=2).generate([PROMPT, "The moon"])
    assert [len(choices) for choices in result.generations] == [2, 2]
    usage = result.llm_output["token_usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def check_stop_and_log_probabilities() -> None:
    text = OpenAI(**ARGS, temperature=0).invoke(PROMPT)
    assert OpenAI(**ARGS, temperature=0).invoke(PROMPT, stop=[text[5:8]]) == text[: text.index(text[5:8])]
    (generation,) = OpenAI(**ARGS, temperature=0, logprobs=2).generate([PROMPT]).generations[0]
    scored = generation.generation_info["logprobs"]
    assert "".join(scored["tokens"]) == text and generation.generation_info["finish_reason"] == "length"


def check_streaming_inside_generate() -> None:
    streaming = OpenAI(**ARGS, streaming=True, logprobs=1)
    assert streaming.invoke(PROMPT) == llm.invoke(PROMPT)


def check_errors_are_raised() -> None:
    with raises(Exception, "max_tokens"):
        OpenAI(**{**ARGS, "max_tokens": -5}).invoke(PROMPT)


if __name__ == "__main__":
    run_checks(dict(vars()))
