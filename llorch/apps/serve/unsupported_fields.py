"""Request fields that llorch does not implement: ignored if harmless, rejected if they would change the answer.

The fields are those of OpenAI, llama.cpp's server, vLLM, SGLang, Ollama, TGI and text-generation-webui. A field without
an entry in these tables changes no answer (`user`, `cache_prompt`, `keep_alive`) or is unknown: it is ignored, and a
header names it. The tables also apply to nested objects, such as `reasoning` or a text part of a message.

Source: OpenAI's API reference; llama.cpp tools/server/server-task.cpp; vLLM and SGLang, entrypoints/openai; Ollama
api/types.go; TGI router/src/lib.rs.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field, ValidationError

from llorch.apps.serve.api_errors import ApiError, to_validation_error
from llorch.apps.serve.requests import Strict, Turn

_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {  # field -> values that change nothing; rejected with other values
    # other inputs than text, other outputs than an answer
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "images": ([],), "audio": (), "modalities": (["text"],), "documents": ([],), "web_search_options": (),
    "inputs": (), "prompt": (), "previous_response_id": (), "conversation": (), "background": (False,),
    "include": ([],), "context": ([],),
    # how the prompt is made
    "chat_template": (), "chat_template_kwargs": ({},), "add_generation_prompt": (True,), "template": ("",),
    "system": ("",), "continue_final_message": (False,), "echo": (False,), "suffix": ("",), "raw": (False,),
    "truncation": ("disabled",), "truncate": (), "truncate_prompt_tokens": (), "add_special_tokens": (),
    "parse_special": (False,), "guideline": ("",), "negative_prompt": ("",), "instruction_template": (),
    "character": (), "context_management": ([],),
    # thinking before an answer
    "enable_thinking": (), "think": (), "thinking": (), "reasoning_effort": (), "reasoning": ({},),
    "reasoning_format": ("none",), "reasoning_budget": (-1,), "thinking_budget": (-1,),
    "thinking_budget_tokens": (-1,), "thinking_token_budget": (-1,), "include_reasoning": (True,),
    "separate_reasoning": (False,), "thinking_forced_open": (False,), "verbosity": ("medium",),
    "enabled": (), "exclude": (False,),
    # where an answer ends, and how many there are
    "n": (1,), "best_of": (1,), "n_cmpl": (1,), "stop": ([],), "stop_token_ids": ([],), "stopping_strings": ([],),
    "stop_sequence": ([],), "stop_regex": ([],), "include_stop_str_in_output": (False,), "no_stop_trim": (False,),
    "ignore_eos": (False,), "ban_eos_token": (False,), "max_tokens": (), "max_completion_tokens": (), "n_predict": (),
    "num_predict": (), "max_new_tokens": (), "max_length": (), "min_tokens": (0,), "min_new_tokens": (0,),
    "min_length": (0,), "max_time": (), "t_max_predict_ms": (0, -1), "n_indent": (0,), "repetition_detection": (),
    "response_fields": ([],),
    # the form of an answer
    "response_format": ({"type": "text"},), "format": ("",), "json_schema": (), "grammar": ("",), "guided_json": (),
    "guided_regex": (), "guided_choice": (), "guided_grammar": (), "structured_outputs": (), "structural_tag": (),
    "regex": (), "ebnf": (), "value": (),
    # how tokens are sampled
    "logit_bias": ({},), "logits_processors": ([],), "custom_logit_processor": (), "bad_words": ([],),
    "allowed_token_ids": (), "banned_tokens": ([], ""), "custom_token_bans": ("",), "repeat_penalty": (1,),
    "rep_pen": (1,), "repeat_last_n": (-1,), "rep_pen_range": (), "repetition_penalty_range": (0,),
    "penalize_nl": (True,), "penalize_newline": (True,), "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,), "do_sample": (True,), "typical_p": (1,), "typical": (1,), "tfs_z": (1,),
    "tfs": (1,), "top_a": (0,), "top_n_sigma": (-1, 0), "min_keep": (0, 1), "mirostat": (0,), "mirostat_mode": (0,),
    "xtc_probability": (0,), "dry_multiplier": (0,), "dynatemp_range": (0,), "dynamic_temperature": (False,),
    "smoothing_factor": (0,), "adaptive_target": (-1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,),
    "penalty_alpha": (0,), "guidance_scale": (1,), "cfg_scale": (1,), "temperature_last": (False,), "samplers": (),
    "sampler_order": ([],), "sampler_priority": ([],), "use_beam_search": (False,), "num_beams": (1,),
    "length_penalty": (1,), "watermark": (False,), "watermarking": (False,), "lora": ([],), "lora_path": (),
    "adapter_id": (), "vllm_xargs": ({},), "options": ({},), "parameters": ({},),
    # additional output
    "logprobs": (False, 0), "top_logprobs": (0,), "n_probs": (0,), "post_sampling_probs": (False,),
    "prompt_logprobs": (0,), "logprob_token_ids": (), "top_n_tokens": (0,), "return_tokens": (False,),
    "return_token_ids": (False,), "return_tokens_as_token_ids": (False,), "return_prompt_text": (False,),
    "return_progress": (False,), "return_full_text": (False,), "details": (False,), "decoder_input_details": (False,),
    "skip_special_tokens": (True,), "continuous_usage_stats": (False,),
}  # fmt: skip
_REPLACEMENTS = {  # llorch's field for the same purpose; the message names a difference
    "repeat_penalty": "repetition_penalty, which counts every token of prompt and answer",
    "rep_pen": "repetition_penalty, which counts every token of prompt and answer",
    "repeat_last_n": "repetition_penalty, which counts every token of prompt and answer",
    "do_sample": "temperature 0",
    "options": "the fields of /openapi.json at the top level, next to model",
    "parameters": "the fields of /openapi.json at the top level, next to model",
    "inputs": "prompt, or messages",
    "format": "response_format", "json_schema": "response_format", "guided_json": "response_format",
    "structured_outputs": "response_format",
    "system": "a message with the role system",
    "lora": "the name of the model, as model:adapter", "lora_path": "the name of the model, as model:adapter",
    "adapter_id": "the name of the model, as model:adapter",
    "n_cmpl": "n", "n_probs": "logprobs", "top_n_tokens": "logprobs",
    "stopping_strings": "stop", "stop_sequence": "stop",
    "thinking": "enable_thinking or reasoning_effort",
}  # fmt: skip
_LEAVE_OUT = "leave the field out"
_LIMITS = ("max_tokens", "max_completion_tokens", "n_predict", "num_predict", "max_new_tokens", "max_length")


class Ignored(Strict):
    """Fields that change no answer, with the types of OpenAI's API."""

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    store: bool | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None


def ignored_fields(body: Strict) -> list[str]:
    """List the ignored fields of a request, with their paths in nested objects.

    If several objects of a list have the same field, such as the parts of a message, only the first is listed.

    Raises:
        ApiError: A field has a wrong type, or would change the answer.
    """
    ignored: dict[tuple[str, ...], str] = {}
    for path, unknown in _unknown_fields(body):
        if not path:
            _require_types(unknown)
        for name, value in unknown.items():
            field = ".".join(map(str, (*path, name)))
            if name not in _NEUTRAL_VALUES:
                ignored.setdefault((*(key for key in path if isinstance(key, str)), name), field)
            elif value not in _NEUTRAL_VALUES[name]:
                remedy = _LEAVE_OUT if path else _remedy(name, body)
                text = f"{field}: this route does not have this field; {remedy}"
                raise ApiError(400, text, param=field, code="unsupported")
    return list(ignored.values())


def _unknown_fields(
    value: object, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], dict[str, object]]]:
    """Yield the path of each object except turns, and its undeclared fields that are not null."""
    children: list[tuple[str | int, object]] = []
    if isinstance(value, Strict):
        if not isinstance(value, Turn):  # fields of a turn go to the chat template
            yield path, {name: extra for name, extra in (value.model_extra or {}).items() if extra is not None}
        children += [(field.alias or name, getattr(value, name)) for name, field in type(value).model_fields.items()]
    elif isinstance(value, list) and value and isinstance(value[0], Strict):
        children += enumerate(value)
    for name, nested in children:
        yield from _unknown_fields(nested, (*path, name))


def _require_types(unknown: Mapping[str, object]) -> None:
    """Raise ApiError for an ignored field if its type differs from OpenAI's API."""
    try:
        Ignored.model_validate(unknown)
    except ValidationError as error:
        raise to_validation_error(error, unknown) from None


def _remedy(name: str, body: Strict) -> str:
    """Tell the client which field of this route to use instead."""
    field = _REPLACEMENTS.get(name)
    if name in _LIMITS:
        field = next((field for field in ("max_tokens", "max_output_tokens") if field in type(body).model_fields), None)
    if field is None or (field.isidentifier() and field not in type(body).model_fields):
        return _LEAVE_OUT
    return f"use {field}"
