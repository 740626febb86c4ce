"""litellm: text_completion through its text-completion-openai provider. Argument: the service."""

from __future__ import annotations

import os
import sys

# Before the import: it would ask the internet for prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import httpx
import litellm
from checks import raises, run_checks

litellm.suppress_debug_info = True

URL = f"{sys.argv[1]}/v1"
PROMPT = "Once upon a time"
MODEL = httpx.get(f"{URL}/models", timeout=60).json()["data"][0]["id"]
ARGS = {
    "model": f"text-completion-openai/{MODEL}",
    "api_base": URL,
    "api_key": "none",
    "num_retries": 0,
    "max_tokens": 12,
    "temperature": 0,
}


def check_text_completion() -> None:
    response = litellm.text_completion(**ARGS, prompt=PROMPT)
    assert response.choices[0].text and response.choices[0].finish_reason == "length"
    assert response.usage.completion_tokens == 12


def check_stream_pieces_add_up_to_the_completion() -> None:
    pieces = [chunk.choices[0].text or "" for chunk in litellm.text_completion(**ARGS, prompt=PROMPT, stream=True)]
    assert len(pieces) > 3
    assert "".join(pieces) == litellm.text_completion(**ARGS, prompt=PROMPT).choices[0].text


async def check_asynchronous_calls() -> None:
    response = await litellm.atext_completion(**ARGS, prompt=PROMPT)
    stream = await litellm.atext_completion(**ARGS, prompt=PROMPT, stream=True)
    assert "".join([chunk.choices[0].text or "" async for chunk in stream]) == response.choices[0].text


def check_several_prompts() -> None:
    response = litellm.text_completion(**ARGS, prompt=[PROMPT, "The moon"])
    assert len(response.choices) == 2


def check_log_probabilities_and_echo() -> None:
    response = litellm.text_completion(**ARGS, prompt=PROMPT, logprobs=2, echo=True)
    scored = response.choices[0].logprobs
    assert (
        response.choices[0].text.startswith(PROMPT)
        and scored.token_logprobs[0] is None
        and scored.token_logprobs[-1] <= 0
    )


def check_streams_report_usage() -> None:
    chunks = list(litellm.text_completion(**ARGS, prompt=PROMPT, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == 12


def check_the_class_of_an_error() -> None:
    with raises(litellm.BadRequestError, "temperature"):
        litellm.text_completion(**{**ARGS, "temperature": -1}, prompt=PROMPT)
    with raises(litellm.NotFoundError, "nowhere"):
        litellm.text_completion(**{**ARGS, "model": "text-completion-openai/nowhere"}, prompt=PROMPT)


if __name__ == "__main__":
    run_checks(dict(vars()))
