"""Every field of OpenAI, vLLM, SGLang, TGI and llama-server is honored, without effect, or refused.

tests/promises/test_s33_request_fields.py sends each of them to a service.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from importlib import import_module
from typing import Any

import pytest

from app.api.openai.request_fields import CHAT, COMPLETIONS, OTHER_FIELDS, check_other_fields, fields_of
from app.api.openai.schemas import ChatRequest, CompletionsRequest
from app.http.errors import ApiError
from tests.support import ROOT
from tests.support.request_fields import (
    ABOUT_THE_RESPONSE,
    BASE,
    HONORED,
    MODELS,
    WITH_OTHERS,
    names_without_effect,
    refused_rows,
)

ENDPOINTS = [COMPLETIONS, CHAT]
_VLLM = """top_k min_p repetition_penalty use_beam_search length_penalty stop_token_ids include_stop_str_in_output
ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs
allowed_token_ids bad_words echo add_special_tokens guided_json guided_regex guided_choice guided_grammar
guided_decoding_backend guided_whitespace_pattern structural_tag structured_outputs priority request_id
logits_processors return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs
thinking_token_budget repetition_detection"""
_SGLANG = """regex ebnf json_schema no_stop_trim stop_regex lora_path session_params session_id custom_params rid
custom_logit_processor return_hidden_states return_routed_experts routed_experts_start_len extra_key
return_cached_tokens_details images_config bootstrap_host bootstrap_port bootstrap_room routed_dp_rank
data_parallel_rank disagg_prefill_dp_rank ngram_corpus_id custom_labels"""
_TGI = """inputs parameters max_new_tokens do_sample return_full_text stop_sequences truncate typical_p watermark
details decoder_input_details top_n_tokens grammar adapter_id best_of"""
_LLAMA_SERVER = """n_predict n_keep n_indent n_discard dynatemp_range dynatemp_exponent repeat_penalty repeat_last_n
dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold
mirostat mirostat_tau mirostat_eta top_n_sigma n_probs min_keep t_max_predict_ms id_slot cache_prompt return_tokens
samplers timings_per_token return_progress post_sampling_probs response_fields lora input_extra n_cmpl typical_p"""
_CHAT = """continue_final_message add_generation_prompt documents chat_template chat_template_kwargs tools tool_choice
parallel_tool_calls reasoning_effort include_reasoning separate_reasoning stream_reasoning mm_processor_kwargs
media_io_kwargs tool_prompt guideline input_ids return_prompt_token_ids return_meta_info task reasoning_format
thinking_forced_open parse_tool_calls max_dynamic_patch min_dynamic_patch use_audio_in_video"""


def _fields_of_openai(endpoint: str) -> set[str]:
    """The import takes seconds; every test process imports this file."""
    module = {COMPLETIONS: "openai.types", CHAT: "openai.types.chat"}[endpoint]
    parameters = import_module(f"{module}.completion_create_params")
    return set(parameters.CompletionCreateParamsBase.__annotations__)


def _extra(**fields: Any) -> ApiError | None:
    try:
        check_other_fields(COMPLETIONS, fields, CompletionsRequest.model_fields)
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_field_of_the_other_servers_has_a_treatment(endpoint: str) -> None:
    known = set(MODELS[endpoint].model_fields) | set(fields_of(endpoint))
    servers = " ".join([_VLLM, _SGLANG, _TGI, _LLAMA_SERVER, *([_CHAT] if endpoint == CHAT else [])])
    assert (_fields_of_openai(endpoint) | set(servers.split())) - known == set()


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_field_has_one_treatment(endpoint: str) -> None:
    rows = Counter(name for field in OTHER_FIELDS if endpoint in field.endpoints for name in field.names)
    assert [name for name, count in rows.items() if count > 1] == []
    assert set(rows) & set(MODELS[endpoint].model_fields) == set()
    assert len(rows) > 200


def test_docs_have_the_table_of_the_code() -> None:
    section = (ROOT / "docs/api.md").read_text().partition("## Fields of other servers\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows == refused_rows(), "the table should be:\n" + "\n".join(refused_rows())
    (line,) = [line for line in section.splitlines() if line.startswith("Without effect: ")]
    assert re.findall("`([^`]+)`", line) == names_without_effect(), ", ".join(f"`{n}`" for n in names_without_effect())


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_docs_name_every_honored_field(endpoint: str) -> None:
    page = (ROOT / "docs/api.md").read_text()
    assert [name for name in MODELS[endpoint].model_fields if f"`{name}`" not in page] == []


def _meaning(endpoint: str, **fields: Any) -> Any:
    body = MODELS[endpoint].model_validate_json(json.dumps({**BASE[endpoint], **fields}))
    if isinstance(body, ChatRequest):
        return body.template_inputs, body.generation_request_for("")
    return body.generation_request


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_honored_fields_change_the_request(endpoint: str) -> None:
    tried = HONORED[endpoint]
    others = ABOUT_THE_RESPONSE | WITH_OTHERS[endpoint]
    assert set(MODELS[endpoint].model_fields) == set(tried) | others
    base = {"max_completion_tokens": None, "vary_equal_prompts": None}
    unchanged = [
        name
        for name, value in tried.items()
        if name not in base and _meaning(endpoint, **{name: value}) == _meaning(endpoint)
    ]
    assert unchanged == []


def test_fields_about_other_fields_change_the_request() -> None:
    resume = {"receipt": {"system_fingerprint": "f", "seed": 1}, "choices": [{"text": "a"}]}
    with pytest.raises(ApiError, match="resume"):
        check_other_fields(CHAT, {"resume": resume}, ChatRequest.model_fields)
    assert _meaning(COMPLETIONS, stream=True, resume=resume) != _meaning(COMPLETIONS, stream=True)
    tools = HONORED[CHAT]["tools"]
    assert _meaning(CHAT, logprobs=True, top_logprobs=3) != _meaning(CHAT, logprobs=True)
    assert _meaning(CHAT, tools=tools, tool_choice="none") == _meaning(CHAT)
    assert _meaning(CHAT, tools=tools, tool_choice="auto") == _meaning(CHAT, tools=tools) != _meaning(CHAT)
    assert _meaning(CHAT, max_tokens=None, max_completion_tokens=3) == _meaning(CHAT, max_tokens=3)


@pytest.mark.parametrize(
    ("field", "hint"),
    [("temprature", "'temperature'"), ("max_token", "'max_tokens'"), ("Top_P", "'top_p'"), ("stop_word", "not ignored"),
     ("new_top_q", "not ignored"), ("guided_poetry_style", "not ignored"), ("min_surprise", "not ignored"),
     ("outputFormat", "not ignored"), ("my-stop-list", "not ignored"), ("maxWords", "not ignored")],
)  # fmt: skip
def test_misspelled_and_unknown_fields_about_the_text_are_refused(field: str, hint: str) -> None:
    error = _extra(**{field: 1})
    assert error and (error.status, error.param, error.code) == (400, field, "unknown_field")
    assert hint in str(error)
    assert _extra(**{field: None}) is None


@pytest.mark.parametrize(
    "field",
    ["attempt", "guid", "admin_id", "client_information", "videos", "desktop_id", "technology_stack"],
)
def test_names_that_only_look_like_parameters_of_the_text_are_accepted(field: str) -> None:
    assert _extra(**{field: "x"}) is None


def test_names_that_no_server_has_are_accepted_up_to_a_number() -> None:
    assert _extra(**{f"my_label_{i}": i for i in range(20)}) is None
    error = _extra(**{f"my_label_{i}": i for i in range(21)})
    assert error and "21 fields are unknown" in str(error)


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"guided_json": {"type": "integer"}}, ("json_schema", {"type": "integer"})),
        ({"guided_json": '{"type": "integer"}'}, ("json_schema", '{"type": "integer"}')),
        ({"guided_regex": "a|b"}, ("regex", "a|b")),
        ({"guided_choice": ["a.b", "(c)", "d/e"]}, ("regex", r"a\.b|\(c\)|d/e")),
        ({"structured_outputs": {"json": True}}, ("json_schema", True)),
        ({"structured_outputs": {"regex": "a", "disable_fallback": True}}, ("regex", "a")),
        ({"structured_outputs": {"choice": ["a"]}}, ("regex", "a")),
        ({"structured_outputs": {"json_object": True}}, ("response_format", {"type": "json_object"})),
    ],
)
def test_constraints_in_the_spelling_of_vllm_are_those_of_the_service(
    fields: dict[str, Any], constraint: tuple[str, Any]
) -> None:
    assert _meaning(COMPLETIONS, **fields).grammar == constraint


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_choice": []},
        {"guided_regex": "a", "regex": "b"},
        {"guided_json": {}, "response_format": {"type": "json_object"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"grammar": "root ::= a"}},
        {"structured_outputs": {"json": {}}, "guided_regex": "a"},
        {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
        {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
        {"structured_outputs": {"json": {}, "whitespace_pattern": " ?"}},
    ],
)
def test_constraints_that_are_several_none_or_unsupported_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        _meaning(COMPLETIONS, **fields)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_format_text_constrains_nothing_and_goes_with_a_constraint(endpoint: str) -> None:
    text = {"type": "text"}
    assert _meaning(endpoint, response_format=text) == _meaning(endpoint)
    for field in ("regex", "guided_regex"):
        assert _meaning(endpoint, response_format=text, **{field: "ab"}) == _meaning(endpoint, regex="ab")
    with pytest.raises(ValueError, match="cannot be combined"):
        _meaning(endpoint, response_format={"type": "json_object"}, regex="ab")


def test_no_alternatives_need_no_log_probabilities() -> None:
    assert _meaning(CHAT, top_logprobs=0) == _meaning(CHAT)
    assert _meaning(CHAT, top_logprobs=0, logprobs=False) == _meaning(CHAT)
    with pytest.raises(ValueError, match="top_logprobs needs logprobs"):
        _meaning(CHAT, top_logprobs=1)
