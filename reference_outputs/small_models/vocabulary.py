"""Vocabularies trained on the stories: byte-level BPE as in Llama 3 and Qwen, SentencePiece-style BPE as in Llama 2.

Each is a `tokenizers.Tokenizer` and the GGUF metadata that makes llama.cpp build the same one.
"""

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import gguf
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)  # fmt: skip

_SPACE = "\u2581"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {"llama-bpe": _CONTRACTIONS + r"\p{N}{1,3}" + _TAIL, "qwen2": _CONTRACTIONS + r"\p{N}" + _TAIL}
_SPECIAL = {
    "llama-bpe": (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ),
    "qwen2": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
}


class Vocabulary(NamedTuple):
    """A tokenizer and its description for a GGUF file.

    Attributes:
        tokenizer: Encodes as the family does, BOS included where the family adds one.
        metadata: `tokenizer.ggml.*` keys and their values.
        end_id: The token that ends a text.
    """

    tokenizer: Tokenizer
    metadata: Mapping[str, object]
    end_id: int


def train_vocabulary(kind: str, texts: Iterable[str], *, size: int) -> Vocabulary:
    """Train a vocabulary.

    Args:
        kind: "llama" (SentencePiece-style), "llama-bpe" or "qwen2".
        texts: The text to count pairs in.
        size: Number of tokens, special ones included.

    Returns:
        The vocabulary.
    """
    return _sentencepiece(texts, size) if kind == "llama" else _byte_level(kind, texts, size)


def _byte_level(kind: str, texts: Iterable[str], size: int) -> Vocabulary:
    special = _SPECIAL[kind]
    first, begins = size - len(special), kind == "llama-bpe"
    tokenizer = _learn_bytes(kind, texts, first)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if begins:
        _begin_with(tokenizer, special[0], first)
    end_id = first + 1 if begins else first
    kinds = [gguf.TokenType.NORMAL] * first + [gguf.TokenType.CONTROL] * len(special)
    metadata = {
        **_token_table(tokenizer, kinds),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in _merges(tokenizer)],
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": end_id,
        "tokenizer.ggml.add_bos_token": begins,
    }
    return Vocabulary(tokenizer, metadata, end_id)


def _learn_bytes(kind: str, texts: Iterable[str], size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
    split = pre_tokenizers.Split(Regex(_SPLITS[kind]), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _sentencepiece(texts: Iterable[str], size: int) -> Vocabulary:
    """Give the tokens ids as SentencePiece does: special, bytes, merged pieces, characters."""
    reserved = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merged, letters = _learn_pieces(texts, size - len(reserved))
    tokenizer = _with_byte_fallback(reserved, merged, letters)
    types, n_pieces = gguf.TokenType, len(merged) + len(letters)
    kinds = [types.UNKNOWN, types.CONTROL, types.CONTROL, *[types.BYTE] * 256, *[types.NORMAL] * n_pieces]
    metadata = {
        **_token_table(tokenizer, kinds),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": [0.0] * len(reserved) + [-float(rank) for rank in range(n_pieces)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": True,
    }
    return Vocabulary(tokenizer, metadata, end_id=2)


def _learn_pieces(texts: Iterable[str], size: int) -> tuple[list[str], list[str]]:
    """Learn word by word; return the merged pieces, best first, and the single characters."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", _SPACE)
    learner.pre_tokenizer = pre_tokenizers.Split(_SPACE, behavior="merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False)
    learner.train_from_iterator((" " + text for text in texts), trainer)
    merged = [first + second for first, second in _merges(learner)]
    return merged, sorted(set(learner.get_vocab()) - set(merged))


def _with_byte_fallback(reserved: list[str], merged: list[str], letters: list[str]) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(reserved + merged + letters)}
    # SentencePiece may build a piece from any two pieces, so every split of it is a merge of the same rank.
    pairs = [(piece[:cut], piece[cut:]) for piece in merged for cut in range(1, len(piece))]
    merges = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in reserved[:3]])
    _begin_with(tokenizer, "<s>", 1)
    return tokenizer


def _begin_with(tokenizer: Tokenizer, token: str, index: int) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, index)])


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def _token_table(tokenizer: Tokenizer, kinds: list[gguf.TokenType]) -> dict[str, list]:
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    return {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [int(kind) for kind in kinds]}
