"""Exercises of lesson 00: a number format, the tensor table of a file, and the merge loop of a tokenizer.

Texts are arrays of bytes, so that the exercises can be solved in any language. The embedding is in `forward`. Adapters
get `call` (the learner's function) and `right` (llorch's, here also `our_x`).
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np

from llorch.apps.learn.exercise import Call, Exercise
from llorch.files.blocks.uniform import widen_bfloat16 as our_widening
from llorch.files.gguf import TensorInfo, read_head
from llorch.files.gguf import read_tensor_table as our_table
from llorch.files.metadata import DEFAULT_LIMITS, Cursor
from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.files.tokenizer.byte_level import ByteLevelBPE, text_bytes
from llorch.runtime.errors import ErrorCode, FormatError, LearnerFault

Array = np.ndarray
AXES = 4  # largest number of a GGUF tensor's axes
HEADER_BYTES = 64 << 20  # larger than the header of any model


class InMemory:
    """Bytes in memory with the interface of llorch's mapped file."""

    path = Path("data")

    def __init__(self, data: Array) -> None:
        """Hold the header of a file that is given as bytes."""
        self.map, self.size = data[:HEADER_BYTES].tobytes(), data.size

    def error(self, code: ErrorCode, message: str, offset: int | None = None) -> FormatError:
        """Make a FormatError, as a mapped file does."""
        return FormatError(code, message, path=self.path, offset=offset)


def bfloat16_to_float32(bits: Array) -> Array:
    """Widen bfloat16 bits to float32: they are its upper 16 bits."""
    out = np.empty(bits.shape, np.float32)
    our_widening(bits, out)
    return out


def tensor_table(data: Array) -> tuple[Array, Array, Array, Array]:
    """Read names (one per line), shapes padded with leading zeros, type numbers, and offsets from the file's start."""
    cursor = Cursor(InMemory(data), DEFAULT_LIMITS)  # type: ignore[arg-type]
    _, count, _, alignment = read_head(cursor)
    rows = list(our_table(cursor, count, alignment).values())
    shapes = [(0,) * (AXES - len(row.shape)) + row.shape for row in rows]
    names = np.frombuffer("\n".join(row.name for row in rows).encode(), np.uint8)
    types, offsets = [row.ggml_type.value for row in rows], [row.offset for row in rows]
    return names, np.array(shapes, np.int64), np.array(types, np.int64), np.array(offsets, np.int64)


def merge(ids: Array, merges: Array, ranks: Array) -> Array:
    """Merge the pair of lowest rank, the leftmost first, until no pair is in `merges`, rows (left, right, merged)."""
    rules = {(left, right): (rank, joined) for (left, right, joined), rank in zip(merges.tolist(), ranks, strict=True)}
    pieces = ids.tolist()
    while candidates := [(rules[pair][0], i) for i, pair in enumerate(pairwise(pieces)) if pair in rules]:
        _, i = min(candidates)
        pieces[i : i + 2] = [rules[pieces[i], pieces[i + 1]][1]]
    return np.asarray(pieces, np.int64)


def _widening_adapted(call: Call, right: Call) -> Call:
    def adapted(codes: Array, out: Array) -> None:
        out[...] = call(bits=codes)

    return adapted


def _table_adapted(call: Call, right: Call) -> Call:
    def adapted(cursor: Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
        names, *numbers = call(data=np.frombuffer(cursor.file.map, np.uint8))
        lines = names.tobytes().decode("utf-8", "replace").split("\n")
        rows = zip(lines, *(column.tolist() for column in numbers), strict=False)  # a name may contain a line break
        return {name: _info(cursor.file.size, name, *row) for name, *row in rows}

    return adapted


def _info(size: int, name: str, dims: list[int], kind: int, offset: int) -> TensorInfo:
    """Make an entry of the tensor table; raise LearnerFault for an unknown type, or bytes outside of the file."""
    shape = tuple(dim for dim in dims if dim)
    if dims != [0] * (len(dims) - len(shape)) + [*shape]:
        raise LearnerFault("tensor_table", f"{name}: expected zeros in front of the axes, got the shape {dims}")
    if kind not in list(GGMLType):
        raise LearnerFault("tensor_table", f"{name}: expected a type of ggml, got {kind}")
    ggml_type = GGMLType(kind)
    block_size, block_bytes = BLOCK_SIZES[ggml_type]
    n_bytes = prod(shape) // block_size * block_bytes
    if min(*shape, offset) < 0 or offset + n_bytes > size:
        raise LearnerFault(
            "tensor_table", f"{name}: expected bytes within the file's {size}, got {offset} to {offset + n_bytes}"
        )
    return TensorInfo(name, shape, offset, n_bytes, ggml_type)


def _scored_adapted(call: Call, right: Call) -> Call:
    """Adapt to SentencePiece: any two pieces that form a token may merge, and the token's rank is the merge's."""

    def adapted(text: str, ranks: Mapping[str, int]) -> list[str]:
        numbers = {piece: number for number, piece in enumerate(dict.fromkeys([*text, *_tokens_in(text, ranks)]))}
        rows = [
            (numbers[piece[:cut]], numbers[piece[cut:]], numbers[piece], ranks[piece])
            for piece in _tokens_in(text, ranks)
            for cut in range(1, len(piece))
            if piece[:cut] in numbers and piece[cut:] in numbers
        ]
        pieces = list(numbers)
        return [pieces[number] for number in _merge_by(call, [numbers[char] for char in text], rows, len(pieces))]

    return adapted


def _ranked_adapted(call: Call, right: Call) -> Call:
    """Adapt to byte-level BPE with its list of merges; the tokenizers library still splits text into words."""

    def adapted(encoder: ByteLevelBPE, text: str) -> tuple[list[int], Iterator[int]]:
        ids: list[int] = []
        starts: list[int] = []
        texts, _, _ = _read_model(encoder)
        for word, (start, _) in encoder._tokenizer.pre_tokenizer.pre_tokenize_str(text):  # type: ignore[union-attr]
            data, n_bytes = text_bytes(word), 0
            for token in _encode_word(call, encoder, word):
                ids.append(token)
                starts.append(start + len(data[:n_bytes].decode("utf-8", "ignore")))
                n_bytes += len(texts[token])
        return ids, iter(starts)

    return adapted


def _encode_word(call: Call, encoder: ByteLevelBPE, word: str) -> list[int]:
    """Encode one word, given in byte-level characters, with the learner's merge loop."""
    texts, ids, ranks = _read_model(encoder)
    if encoder._tokenizer.model.ignore_merges and word in ids:  # type: ignore[attr-defined]
        return [ids[word]]
    pieces = _tokens_in(word, ids)
    pairs = {(piece[:cut], piece[cut:]) for piece in pieces for cut in range(1, len(piece))} & ranks.keys()
    rows = [(ids[left], ids[right], ids[left + right], ranks[left, right]) for left, right in pairs]
    return _merge_by(call, [ids[char] for char in word], rows, len(texts))


def _merge_by(call: Call, ids: list[int], rows: list[tuple[int, int, int, int]], n_pieces: int) -> list[int]:
    """Run the learner's merge loop; a row has the ids of left, right and merged piece, and the rank."""
    if not rows:
        return ids
    table = np.array(sorted(rows, key=lambda row: row[3]), np.int64).reshape(-1, 4)
    merged = call(ids=np.array(ids, np.int64), merges=table[:, :3].copy(), ranks=table[:, 3].copy()).tolist()
    if unknown_ids := [number for number in merged if not 0 <= number < n_pieces]:
        raise LearnerFault("merge", f"expected the id of a piece, got {unknown_ids[0]}")
    return merged


def _tokens_in(text: str, tokens: Mapping[str, int]) -> list[str]:
    """List the tokens of two or more characters that a text contains."""
    longest = max(map(len, tokens), default=0)
    spans = ((i, end) for i in range(len(text)) for end in range(i + 2, min(i + longest, len(text)) + 1))
    return list(dict.fromkeys(text[i:end] for i, end in spans if text[i:end] in tokens))


@cache
def _read_model(encoder: ByteLevelBPE) -> tuple[list[str], dict[str, int], dict[tuple[str, str], int]]:
    """Read token texts by id, ids by text, and ranks of merges from the tokenizers library."""
    model = json.loads(encoder._tokenizer.to_str())["model"]
    texts = [""] * (1 + max(model["vocab"].values()))
    for text, number in model["vocab"].items():
        texts[number] = text
    return texts, model["vocab"], {(left, right): rank for rank, (left, right) in enumerate(model["merges"])}


BFLOAT16 = Exercise(
    name="bfloat16_to_float32", reference=bfloat16_to_float32, returns=("numbers",),
    replaces="llorch.files.blocks.uniform.widen_bfloat16", adapt=_widening_adapted,
)  # fmt: skip
TENSOR_TABLE = Exercise(
    name="tensor_table", reference=tensor_table, returns=("names", "shapes", "types", "offsets"),
    replaces="llorch.files.gguf.read_tensor_table", adapt=_table_adapted,
)  # fmt: skip
MERGE = Exercise(
    name="merge", reference=merge, returns=("merged",), replaces="llorch.files.tokenizer.sentencepiece.merge",
    adapt=_scored_adapted, also=(("llorch.files.tokenizer.byte_level.ByteLevelBPE.encode_spans", _ranked_adapted),),
)  # fmt: skip
