"""What the OpenAI endpoints do with each request field of OpenAI, vLLM, SGLang, TGI, llama-server and their clients.

Honored fields are fields of the pydantic models in schemas.py. This table has all others: those without an effect on
the prompt or the text are accepted, the rest is refused unless their value asks for what the service does anyway.
docs/api.md shows the table; tests/api/openai/test_request_fields.py sends each row to a service.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from app.http.errors import ApiError

COMPLETIONS, CHAT = "completions", "chat"
MAX_UNKNOWN = 20
"""Unknown fields in one request: more are an error, since each is compared with all known names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherField:
    """A field, or several that are treated alike, which the service does not honor."""

    names: tuple[str, ...]
    instead: str = ""
    """What to do instead, for the error message; empty for fields without effect, which are accepted with any value."""
    neutral: tuple[Any, ...] = ()
    """Values of a refused field that ask for nothing, besides null and everything empty."""
    endpoints: tuple[str, ...] = (COMPLETIONS, CHAT)

    @property
    def is_refused(self) -> bool:
        """Whether values that ask for something are an error."""
        return bool(self.instead)

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether the text is the same with this value as without the field."""
        return not self.is_refused or value is None or value in ("", [], {}) or value in self.neutral


def _without_effect(names: str) -> OtherField:
    return OtherField(names=tuple(names.split()))


def _refused(names: str, instead: str, *neutral: Any, endpoints: tuple[str, ...] = (COMPLETIONS, CHAT)) -> OtherField:
    return OtherField(names=tuple(names.split()), instead=instead, neutral=neutral, endpoints=endpoints)


_ONLY_CHAT, _ONLY_COMPLETIONS = (CHAT,), (COMPLETIONS,)
_NO_MEDIA = "the model reads and writes text: send text only"
_NO_ADAPTER = "the service applies no adapters: merge it into the weights, and serve these"
_NO_CALLS = "leave it out, or use POST /v1/chat/completions"

OTHER_FIELDS: tuple[OtherField, ...] = (
    # What the client or the operator records, and where or when a cluster computes.
    _without_effect("metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options"),
    _without_effect("prompt_cache_retention custom_labels extra_key rid session_id trace litellm_metadata tags"),
    _without_effect("cache_prompt id_slot slot_id keep_alive ttl routed_dp_rank data_parallel_rank"),
    _without_effect("disagg_prefill_dp_rank bootstrap_host bootstrap_port bootstrap_room nvext"),
    # How the text is computed, shown or checked, with the same text.
    _without_effect("spaces_between_special_tokens detokenize_incrementally disable_fallback sse_ping_interval"),
    _without_effect("guided_decoding_backend use_cache stream_interval return_progress timings_per_token"),
    _without_effect("mm_processor_kwargs media_io_kwargs images_config use_audio_in_video max_dynamic_patch"),
    _without_effect("min_dynamic_patch image_detail include_obfuscation prediction draft_model speculative.n_max"),
    _without_effect("speculative.n_min speculative.p_min ngram_corpus_id backend_sampling"),
    # Other names for lengths.
    _refused(
        "max_new_tokens n_predict num_predict max_length max_output_tokens max_tokens_to_sample", "send max_tokens"
    ),
    _refused("max_completion_tokens", "send max_tokens", endpoints=_ONLY_COMPLETIONS),
    _refused("min_new_tokens min_length", "send min_tokens", 0),
    _refused("n_cmpl num_return_sequences num_completions", "send n", 1),
    _refused("best_of", "use POST /v1/completions", 1, endpoints=_ONLY_CHAT),
    _refused("max_time t_max_predict_ms t_max_prompt_ms timeout", "send deadline_ms", -1),
    _refused("truncate truncation prompt_truncate_len", "send truncate_prompt_tokens", False, "disabled"),
    _refused("auto_max_new_tokens", "send max_tokens", False),
    _refused("n_keep n_discard context_shift", "the service never shifts a text out of the context: shorten it", 0),
    _refused("num_ctx n_ctx", "the context is the model's: GET /v1/models has it as max_model_len"),
    _refused("n_indent", "send regex or grammar, which can constrain the text's indentation", 0),
    # Other names and kinds of sampling.
    _refused("do_sample", "send temperature 0 for greedy text", True),
    _refused("temp", "send temperature"),
    _refused("top_k_sampling", "send top_k"),
    _refused("typical", "send typical_p", 1),
    _refused("repeat_penalty rep_pen", "send repetition_penalty, which counts the whole prompt and text", 1),
    _refused("repeat_last_n repetition_penalty_range rep_pen_range", "repetition_penalty counts the whole text", -1),
    _refused("penalize_nl", "send logit_bias for the line break's token", True),
    _refused("random_seed sampling_seed", "send seed"),
    _refused("encoder_repetition_penalty", "send repetition_penalty", 1),
    _refused("no_repeat_ngram_size", "send frequency_penalty or repetition_penalty", 0),
    _refused(
        "dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers dry_range",
        "send frequency_penalty or repetition_penalty",
        0,
        -1,
    ),
    _refused("repetition_detection", "send max_tokens or repetition_penalty"),
    _refused("xtc_probability xtc_threshold", "send temperature, top_p, min_p or typical_p", 0),
    _refused(
        "mirostat mirostat_mode mirostat_tau mirostat_eta tfs tfs_z top_a epsilon_cutoff eta_cutoff penalty_alpha",
        "send temperature, top_k, top_p, min_p or typical_p",
        0,
    ),
    _refused("top_n_sigma top_nsigma top_n_sigma_threshold", "send min_p or top_p", -1, 0),
    _refused("smoothing_factor smoothing_curve skew", "send temperature", 0),
    _refused(
        "dynatemp_range dynatemp_exponent dynamic_temperature dynatemp_low dynatemp_high", "send temperature", 0, False
    ),
    _refused("adaptive_target adaptive_decay", "send temperature", -1),
    _refused("temperature_last sampler_priority samplers sampler_order", "the order of sampling is fixed", False),
    _refused("min_keep", "send top_k, top_p or min_p alone", 0, 1),
    _refused("use_beam_search", "send best_of to /v1/completions, which ranks sampled texts", False),
    _refused("num_beams beam_width", "send best_of to /v1/completions, which ranks sampled texts", 1),
    _refused("length_penalty", "the service has no beam search: send best_of to /v1/completions", 1, 0),
    _refused("early_stopping", "the service has no beam search: send best_of to /v1/completions", False),
    _refused("guidance_scale cfg_scale negative_prompt negative_prompt_ids", "say it in the prompt", 1),
    _refused("watermark", "the service writes no watermark: send false", False),
    _refused("logits_processors custom_logit_processor custom_params vllm_xargs", "send logit_bias, regex or grammar"),
    _refused("allowed_token_ids", "send regex or grammar"),
    _refused(
        "bad_words bad_words_ids banned_strings banned_tokens custom_token_bans", "send logit_bias -100 by token id"
    ),
    _refused("ban_eos_token", "send ignore_eos", False),
    _refused("thinking_token_budget thinking_budget reasoning_budget", "send max_tokens", -1),
    # Stops, and what of the text is returned.
    _refused("stop_sequences stop_words stop_strings stopping_strings", "send stop"),
    _refused("stop_regex", "send stop, or regex for the whole text"),
    _refused("no_stop_trim", "send include_stop_str_in_output", False),
    _refused("include_stop", "send include_stop_str_in_output", False),
    _refused("stop_reason_details response_fields", "the response has all its fields: leave it out"),
    _refused("skip_special_tokens", "special tokens have no text: send logprobs for their ids", True),
    _refused("detokenize", "send logprobs for the tokens of the text", True),
    _refused("return_full_text", "send echo to /v1/completions", False),
    _refused("echo", "use POST /v1/completions, or continue_final_message", False, endpoints=_ONLY_CHAT),
    _refused("details decoder_input_details", "send logprobs, and echo for the prompt's", False),
    _refused("top_n_tokens n_probs", "send logprobs (with top_logprobs for chats)", 0),
    _refused("top_logprobs", "send logprobs with a number", 0, endpoints=_ONLY_COMPLETIONS),
    _refused("prompt_logprobs", "send logprobs and echo to /v1/completions, or use POST /score", False),
    _refused(
        "prompt_logprobs_start return_text_in_logprobs input_token_logprobs logprob_start_len logprob_token_ids",
        "send logprobs and echo to /v1/completions, or use POST /score",
        False,
        -1,
    ),
    _refused("return_logprob", "send logprobs", False),
    _refused("post_sampling_probs", "log-probabilities are the model's own, before sampling: leave it out", False),
    _refused("return_token_ids", "use POST /v1/completions", False, endpoints=_ONLY_CHAT),
    _refused("resume", "use POST /v1/completions with the rendered prompt", endpoints=_ONLY_CHAT),
    _refused(
        "return_prompt_token_ids return_tokens return_tokens_as_token_ids return_meta_info",
        "send return_token_ids to /v1/completions, and the prompt to POST /tokenize",
        False,
    ),
    _refused(
        "return_hidden_states return_routed_experts return_cached_tokens_details routed_experts_start_len",
        "the service returns text and log-probabilities: leave it out",
        False,
        0,
    ),
    _refused("return_prompt", "send echo to /v1/completions", False),
    # Constraints.
    _refused("guided_grammar ebnf", "send grammar, in Lark's notation"),
    _refused("guided_whitespace_pattern", "send json_schema with x-guidance.whitespace_pattern"),
    _refused("structural_tag", "send grammar, in Lark's notation"),
    _refused("grammar_lazy grammar_triggers preserved_tokens", "send grammar, which holds from the first token", False),
    _refused("format", "send response_format", "text"),
    _refused("guided_options", "send json_schema, regex or guided_choice"),
    # The prompt.
    _refused("inputs input text", "send prompt, or messages for a chat"),
    _refused("parameters options extra_body extra_query extra_headers", "send its fields beside prompt or messages"),
    _refused("prompt_embeds", "send prompt as text or token ids"),
    _refused("prompt prompt_token_ids input_ids", "use POST /v1/completions", endpoints=_ONLY_CHAT),
    _refused(
        "prompt_token_ids input_ids", "send prompt, which may be a list of token ids", endpoints=_ONLY_COMPLETIONS
    ),
    _refused("suffix", "use POST /v1/completions", endpoints=_ONLY_CHAT),
    _refused("input_prefix input_suffix input_extra", "send prompt and suffix"),
    _refused("source", "use POST /complete"),
    _refused("add_special_tokens", "send prompt as token ids, from POST /tokenize", True, endpoints=_ONLY_COMPLETIONS),
    _refused(
        "add_special_tokens", "render the prompt, and send its token ids to /v1/completions", endpoints=_ONLY_CHAT
    ),
    _refused("add_bos_token add_bos", "send prompt as token ids, from POST /tokenize", True),
    _refused(
        "raw", "use POST /v1/completions for a prompt without a template, or /v1/chat/completions for one with it"
    ),
    _refused("system context character guideline tool_prompt", "send it in prompt, or as a message of a chat"),
    _refused("safe_prompt", "say it in a message", False),
    _refused("image_data multimodal_data images mm_data audio", _NO_MEDIA),
    _refused("modalities", _NO_MEDIA, ["text"]),
    _refused("messages", "use POST /v1/chat/completions", endpoints=_ONLY_COMPLETIONS),
    _refused(
        "chat_template template instruction_template name1 name2",
        "render the prompt, and send it to /v1/completions; the model's own template is in its directory",
    ),
    _refused("chat_template_kwargs documents", "use POST /v1/chat/completions", endpoints=_ONLY_COMPLETIONS),
    _refused(
        "add_generation_prompt continue_final_message",
        "use POST /v1/chat/completions",
        False,
        endpoints=_ONLY_COMPLETIONS,
    ),
    _refused("enable_thinking thinking think", "send chat_template_kwargs to /v1/chat/completions", False),
    _refused("reasoning", "send reasoning_effort, or chat_template_kwargs"),
    _refused("reasoning_effort", "use POST /v1/chat/completions", "none", endpoints=_ONLY_COMPLETIONS),
    _refused("prompt_mode task", "send chat_template_kwargs"),
    _refused("verbosity", "say it in the prompt", "medium"),
    # Tools and answers in parts.
    _refused("tools functions", _NO_CALLS, endpoints=_ONLY_COMPLETIONS),
    _refused("tool_choice function_call", _NO_CALLS, "none", "auto", endpoints=_ONLY_COMPLETIONS),
    _refused("functions", "send tools", endpoints=_ONLY_CHAT),
    _refused("function_call", "send tool_choice", "none", "auto", endpoints=_ONLY_CHAT),
    _refused("parallel_tool_calls", _NO_CALLS, True, False, endpoints=_ONLY_COMPLETIONS),
    _refused("parse_tool_calls", "the text of the message has the calls, as the model writes them: parse it", False),
    _refused(
        "web_search_options enable_search plugins", "the service searches nothing: send the results as messages", False
    ),
    _refused("moderation", "the service moderates nothing: check the text elsewhere"),
    _refused(
        "reasoning_format reasoning_in_content separate_reasoning thinking_forced_open",
        "the text of the message has the reasoning, as the model writes it: parse it",
        False,
        "none",
    ),
    _refused(
        "stream_reasoning include_reasoning", "the text of the message has the reasoning, as the model writes it", True
    ),
    # What a cluster or a host would have to do.
    _refused("lora lora_path lora_request adapter_id adapter", _NO_ADAPTER),
    _refused("models route provider transforms", "the service serves one model: leave it out"),
    _refused("priority", "keys take turns, and requests of one key run in order: leave it out", 0),
    _refused("cache_salt", "each key has its own cache: use a key for each tenant"),
    _refused("kv_transfer_params disaggregated_params session_params", "the service moves no caches: leave it out"),
)

_TEXT_NAME = re.compile(
    r"cutoff|decod|grammar|logit|logprob|mirostat|penalt|prompt|reason|regex|sampl|schema|structur|suffix|think|token"
    r"|typical"
    # Short ones begin a word: "attempt", "guid", "admin_id" and "client_information" are no parameters of the text.
    r"|(?:^|[^a-z])(?:bias|beam|echo|eos|format|guid(?:ed|ance)|json|prob|seed|stop|temp|tool)"
    r"|(?:^|[^a-z])(?:max|min|top)(?:[^a-z]|$)"
)
"""A field with such a word in its name asks for something about prompt or text, even if no server has it today."""
_CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def fields_of(endpoint: str) -> dict[str, OtherField]:
    """Name -> row of the table, for one endpoint."""
    return {name: field for field in OTHER_FIELDS if endpoint in field.endpoints for name in field.names}


_TABLES = {endpoint: fields_of(endpoint) for endpoint in (COMPLETIONS, CHAT)}


def unknown_fields(endpoint: str, given: Mapping[str, Any]) -> list[str]:
    """The given names that no server has; null asks for nothing."""
    return [name for name, value in given.items() if name not in _TABLES[endpoint] and value is not None]


def check_other_fields(endpoint: str, given: Mapping[str, Any], honored: Iterable[str]) -> None:
    """Raises ApiError 400 for a field that is refused, and for an unknown one that may be about prompt or text.

    given: the fields of a request that are not `honored`.
    """
    for name, value in given.items():
        field = _TABLES[endpoint].get(name)
        if field and not field.asks_for_nothing(value):
            raise ApiError(400, f"{name} is not supported: {field.instead}", param=name)
    unknown = unknown_fields(endpoint, given)
    if len(unknown) > MAX_UNKNOWN:
        message = f"{len(unknown)} fields are unknown, such as {unknown[0][:60]!r}: GET /docs lists all fields"
        raise ApiError(400, message, param=unknown[0][:60], code="unknown_field")
    for name in unknown:
        _check_unknown(name[:60], honored)


def _check_unknown(name: str, honored: Iterable[str]) -> None:
    if close := get_close_matches(name.lower(), honored, n=1, cutoff=0.75):
        hint = f"did you mean {close[0]!r}?"
    elif _TEXT_NAME.search(_CAMEL_CASE.sub("_", name).lower()):
        hint = "its name is about prompt or text, so it is not ignored: GET /docs lists all fields"
    else:
        return
    raise ApiError(400, f"unknown field {name!r}: {hint}", param=name, code="unknown_field")
