"""Fields that clients may send and that nothing is done with: most change nothing, some would change the meaning."""

from collections.abc import Mapping

from llorch.serve.api_errors import ApiError
from llorch.serve.requests import Body

_WITHOUT: Mapping[str, tuple[object, ...]] = {  # what routes lack that do not declare it; the values that mean nothing
    "tools": ([],), "tool_choice": ("none",), "functions": ([],), "function_call": ("none",), "logit_bias": ({},),
    "audio": (), "modalities": (["text"],), "best_of": (1,), "echo": (False,), "suffix": ("",), "images": ([],),
    "chat_template": (), "chat_template_kwargs": ({},), "documents": ([],), "add_generation_prompt": (True,),
    "continue_final_message": (False,), "web_search_options": (), "previous_response_id": (), "conversation": (),
    "background": (False,), "include": ([],), "truncation": ("disabled",), "prompt": (), "stop": ([],), "n": (1,),
    "max_tokens": (), "max_completion_tokens": (), "min_tokens": (0,), "logprobs": (False, 0), "top_logprobs": (0,),
    "prompt_logprobs": (0,), "response_format": ({"type": "text"},), "json_schema": (), "grammar": ("",),
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (), "structured_outputs": (),
    "ignore_eos": (False,), "stop_token_ids": ([],), "bad_words": ([],), "logits_processors": ([],), "lora": ([],),
    "use_beam_search": (False,), "length_penalty": (1,), "typical_p": (1,), "mirostat": (0,), "xtc_probability": (0,),
    "dry_multiplier": (0,), "top_n_sigma": (-1,),
}  # fmt: skip


def ignored_fields(body: Body) -> list[str]:
    """Fields that nothing is done with; ApiError for one that would change what the answer means."""
    unknown = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
    for name, value in unknown.items():
        if name in _WITHOUT and value not in _WITHOUT[name]:
            raise ApiError(400, f"{name}: this route does not have it; leave it out", param=name, code="unsupported")
    return [name for name in unknown if name not in _WITHOUT]
