"""Tokenizer folders in the form of Llama 2, Llama 3 and Qwen, made from other vocabularies."""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import numpy as np

from llorch.files.gguf import open_gguf
from llorch.files.tokenizer.pipeline import BYTE_LEVEL, WORDS

Json = dict[str, object]


def write_folder(vocabulary: Path, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json with the tokens of a GGUF vocabulary."""
    with open_gguf(vocabulary) as file:
        content, config = folder_content(file.metadata)
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def folder_content(metadata: Mapping[str, object]) -> tuple[Json, Json]:
    """The content of tokenizer.json and of tokenizer_config.json."""
    tokens = [raw.decode() for raw in metadata["tokenizer.ggml.tokens"]]  # type: ignore[union-attr]
    types = metadata["tokenizer.ggml.token_type"]
    assert isinstance(types, np.ndarray)
    special = {tokens[i]: int(i) for i in np.flatnonzero((types == 2) | (types == 3))}
    if metadata["tokenizer.ggml.model"] == "llama":
        scores = metadata["tokenizer.ggml.scores"]
        assert isinstance(scores, np.ndarray)
        model = sentencepiece_model(tokens, {tokens[i]: int(i) for i in np.flatnonzero(types == 1)}, scores)
        parts = {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Prepend", "prepend": "\u2581"},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
                ],
            },
            "pre_tokenizer": None,
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ],
            },
        }
        return folder_json(model, special, parts, begin="<s>"), {"bos_token": "<s>", "eos_token": "</s>"}
    llama_3 = metadata["tokenizer.ggml.pre"] == "llama-bpe"
    model = {
        "type": "BPE", "ignore_merges": llama_3, "byte_fallback": False,
        "vocab": {tokens[i]: int(i) for i in np.flatnonzero(types == 1)},
        "merges": [raw.decode() for raw in metadata["tokenizer.ggml.merges"]],  # type: ignore[union-attr]
    }  # fmt: skip
    parts = {
        "normalizer": None if llama_3 else {"type": "NFC"},
        "pre_tokenizer": deepcopy(WORDS["llama-bpe" if llama_3 else "qwen2"]),  # tests change it
        "decoder": BYTE_LEVEL,
    }
    if llama_3:
        config = {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|eot_id|>", "__type": "AddedToken"}}
        return folder_json(model, special, parts, begin="<|begin_of_text|>"), config
    return folder_json(model, special, parts, begin=None), {"bos_token": None, "eos_token": "<|im_end|>"}


def folder_json(model: Mapping[str, object], special: Mapping[str, int], parts: Json, *, begin: str | None) -> Json:
    """A whole tokenizer.json; `begin` goes before every text."""
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": begin, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {begin: {"id": begin, "ids": [special.get(begin or "")], "tokens": [begin]}},
    }
    return parts | {
        "version": "1.0", "truncation": None, "padding": None, "model": dict(model),
        "added_tokens": [added_token(token_id, text) for text, token_id in special.items()],
        "post_processor": {"type": "Sequence", "processors": [BYTE_LEVEL, template]} if begin else None,
    }  # fmt: skip


def added_token(token_id: int, text: str, *, special: bool = True) -> Json:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    return {"id": token_id, "content": text, **flags}


def sentencepiece_model(tokens: list[str], text: Mapping[str, int], scores: np.ndarray) -> Json:
    """A BPE model whose merges are all ways to split each token, the best-scored token first."""
    merges = [
        (-scores[token_id], text[token[:cut]], text[token[cut:]], f"{token[:cut]} {token[cut:]}")
        for token, token_id in text.items()
        for cut in range(1, len(token))
        if token[:cut] in text and token[cut:] in text
    ]
    return {
        "type": "BPE", "byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>",
        "vocab": {token: token_id for token_id, token in enumerate(tokens)},
        "merges": [merge for _, _, _, merge in sorted(merges)],
    }  # fmt: skip
