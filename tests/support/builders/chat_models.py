"""Small models that can chat: a built-in one beside a chat template in the form of ChatML, Llama 3 or a thinking model.

The built-in vocabularies have the control tokens of their families, so ids are those of a model of that family.
"""

import json
from pathlib import Path

from llorch.files import open_weights
from llorch.files.convert import convert
from llorch.model.model import Model
from llorch.runtime.builtin import builtin_path

_OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_CALLS = (
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
)
_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
)
CHATML = (
    _TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
    + _CALLS
    + "<|im_end|>{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + _OPENING
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<|eot_id|>{% endgeneration %}"
    "{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Leaves the thinking of all turns but the last one out, as Qwen3 does.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + _OPENING
)
# Opens a turn with something that it does not write again, as DeepSeek-R1 does.
OPENS_WITH_THINKING = THINKING + "{% if add_generation_prompt %}<think>\n{% endif %}"
NO_END = (
    "{% for m in messages %}{{ m.role }}:\n{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)


def chat_folder(folder: Path, name: str, template: str | None) -> Path:
    """Write a built-in model as a Hugging Face folder, with a chat template."""
    convert(builtin_path(name), folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def with_token_beyond_rows(folder: Path, text: str) -> int:
    """Add a token to the tokenizer of a folder that the embedding has no row for; return its id."""
    path = folder / "tokenizer.json"
    content, n_rows = json.loads(path.read_text()), open_weights(folder).config.vocab_size
    added = content["added_tokens"]
    added.append(added[-1] | {"id": n_rows, "content": text, "special": False})
    path.write_text(json.dumps(content))
    return n_rows


def chat_model(folder: Path, name: str, template: str | None) -> Model:
    """The same, opened."""
    return Model(open_weights(chat_folder(folder, name, template)))
