"""Whole Hugging Face folders: tiny random weights beside a tiny tokenizer, none of it written by llorch."""

import json
from pathlib import Path

import numpy as np

from builders.huggingface_folders import folder_content
from builders.tiny_models import random_tensors
from builders.tiny_models import write_folder as write_weights
from builders.vocabularies import tiny_byte_level, tiny_sentencepiece

ROWS = 272  # a few more than there are tokens
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}\u4f60{% endif %}"
)
VOCABULARIES = {
    "llama": tiny_sentencepiece(),
    "llama-bpe": tiny_byte_level(),
    "qwen2": tiny_byte_level() | {"tokenizer.ggml.pre": "qwen2"},
    "qwen3": tiny_byte_level() | {"tokenizer.ggml.pre": "qwen2"},
}
FAMILY = {"llama-bpe": "llama"}


def tensors_with_rows(family: str, rows: int) -> dict[str, np.ndarray]:
    """Random tensors whose vocabulary has so many rows."""
    rng = np.random.default_rng(3)
    tensors = random_tensors(family)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = rng.normal(0, 0.1, (rows, tensors[name].shape[1])).astype(np.float32)
    return tensors


def write_whole_folder(folder: Path, kind: str, **changes: object) -> Path:
    """Write a model and a tokenizer; `kind` is a key of `VOCABULARIES`."""
    family = FAMILY.get(kind, kind)
    settings: dict[str, object] = {"vocab_size": ROWS, "max_position_embeddings": 512}
    write_weights(folder, tensors_with_rows(family, ROWS), family, **(settings | changes))
    tokenizer, config = folder_content(VOCABULARIES[kind])
    sentencepiece = kind == "llama"
    begin, end = ("<s>", "</s>") if sentencepiece else ("<|begin_of_text|>", "<|eot_id|>")
    config |= {"bos_token": begin, "eos_token": end, "pad_token": end, "unk_token": None, "chat_template": TEMPLATE}
    config["tokenizer_class"] = "Qwen2Tokenizer" if kind == "qwen2" else "PreTrainedTokenizerFast"
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05}
    ids = {"bos_token_id": 1, "eos_token_id": 2} if sentencepiece else {"bos_token_id": 260, "eos_token_id": [261, 259]}
    for name, content in (
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", config),
        ("generation_config.json", ids | sampling),
    ):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder
