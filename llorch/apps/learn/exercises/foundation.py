"""Parts of lesson 00 before the embedding: a number format, the tensor table of a file, the merge loop of a tokenizer.

Texts are arrays of bytes, so that these can be written in any language.
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
AXES = 4  # of a tensor in GGUF, at most
HEADER_BYTES = 64 << 20  # more than the header of any model


class InMemory:
    """Bytes where our reader expects a file."""

    path = Path("data")

    def __init__(self, data: Array) -> None:
        """Hold the bytes of a whole file."""
        self.map, self.size = data[:HEADER_BYTES].tobytes(), data.size

    def error(self, code: ErrorCode, message: str, offset: int | None = None) -> FormatError:
        """Make the error that a file with this fault gives."""
        return FormatError(code, message, path=self.path, offset=offset)


def bfloat16_to_float32(bits: Array) -> Array:
    """Widen bfloat16 bits: they are the upper sixteen bits of the numbers."""
    out = np.empty(bits.shape, np.float32)
    our_widening(bits, out)
    return out


def tensor_table(data: Array) -> tuple[Array, Array, Array, Array]:
    """Names (a line each), shapes with zeros in front, type numbers, and offsets from the start of the file."""
    cursor = Cursor(InMemory(data), DEFAULT_LIMITS)  # type: ignore[arg-type]
    _, count, _, alignment = read_head(cursor)
    rows = list(our_table(cursor, count, alignment).values())
    shapes = [(0,) * (AXES - len(row.shape)) + row.shape for row in rows]
    names = np.frombuffer("\n".join(row.name for row in rows).encode(), np.uint8)
    types, offsets = [row.ggml_type.value for row in rows], [row.offset for row in rows]
    return names, np.array(shapes, np.int64), np.array(types, np.int64), np.array(offsets, np.int64)


def merge(ids: Array, merges: Array, ranks: Array) -> Array:
    """Join the two neighbours of the lowest rank, the leftmost of equals, again and again until none is listed."""
    made = {(left, right): (rank, both) for (left, right, both), rank in zip(merges.tolist(), ranks, strict=True)}
    pieces = ids.tolist()
    while found := [(made[pair][0], at) for at, pair in enumerate(pairwise(pieces)) if pair in made]:
        _, at = min(found)
        pieces[at : at + 2] = [made[pieces[at], pieces[at + 1]][1]]
    return np.asarray(pieces, np.int64)


def _widening_adapted(call: Call, right: Call) -> Call:
    def adapted(codes: Array, out: Array) -> None:
        out[...] = call(bits=codes)

    return adapted


def _table_adapted(call: Call, right: Call) -> Call:
    def adapted(cursor: Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
        names, *numbers = call(data=np.frombuffer(cursor.file.map, np.uint8))
        lines = names.tobytes().decode("utf-8", "replace").split("\n")
        rows = zip(lines, *(each.tolist() for each in numbers), strict=False)  # another name may hold a line break
        return {name: _info(cursor.file.size, name, *row) for name, *row in rows}

    return adapted


def _info(size: int, name: str, dims: list[int], kind: int, offset: int) -> TensorInfo:
    """Make a row of the table; an impossible value is the learner's fault."""
    shape = tuple(dim for dim in dims if dim)
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
    """SentencePiece: a token may be made of any two pieces, and its score is its rank."""

    def adapted(text: str, ranks: Mapping[str, int]) -> list[str]:
        numbers = {piece: number for number, piece in enumerate(dict.fromkeys([*text, *_inside(text, ranks)]))}
        rows = [
            (numbers[piece[:cut]], numbers[piece[cut:]], numbers[piece], ranks[piece])
            for piece in _inside(text, ranks)
            for cut in range(1, len(piece))
            if piece[:cut] in numbers and piece[cut:] in numbers
        ]
        pieces = list(numbers)
        return [pieces[number] for number in _merge_by(call, [numbers[each] for each in text], rows, len(pieces))]

    return adapted


def _ranked_adapted(call: Call, right: Call) -> Call:
    """Byte-level BPE: a list of merges; the library still cuts text into words."""

    def adapted(encoder: ByteLevelBPE, text: str) -> tuple[list[int], Iterator[int]]:
        ids: list[int] = []
        starts: list[int] = []
        texts, _, _ = _model_of(encoder)
        for word, (start, _) in encoder._tokenizer.pre_tokenizer.pre_tokenize_str(text):  # type: ignore[union-attr]
            data, n_bytes = text_bytes(word), 0
            for token in _word(call, encoder, word):
                ids.append(token)
                starts.append(start + len(data[:n_bytes].decode("utf-8", "ignore")))
                n_bytes += len(texts[token])
        return ids, iter(starts)

    return adapted


def _word(call: Call, encoder: ByteLevelBPE, word: str) -> list[int]:
    """Encode one word, in characters of byte-level BPE, with the learner's merge loop."""
    texts, ids, ranks = _model_of(encoder)
    if encoder._tokenizer.model.ignore_merges and word in ids:  # type: ignore[attr-defined]
        return [ids[word]]
    pieces = _inside(word, ids)
    pairs = {(piece[:cut], piece[cut:]) for piece in pieces for cut in range(1, len(piece))} & ranks.keys()
    rows = [(ids[left], ids[right], ids[left + right], ranks[left, right]) for left, right in pairs]
    return _merge_by(call, [ids[each] for each in word], rows, len(texts))


def _merge_by(call: Call, ids: list[int], rows: list[tuple[int, int, int, int]], n_pieces: int) -> list[int]:
    """Run the learner's merge loop; rows are ids of left, right and joined piece, and the rank."""
    if not rows:
        return ids
    table = np.array(sorted(rows, key=lambda row: row[3]), np.int64).reshape(-1, 4)
    merged = call(ids=np.array(ids, np.int64), merges=table[:, :3].copy(), ranks=table[:, 3].copy()).tolist()
    if strange := [number for number in merged if not 0 <= number < n_pieces]:
        raise LearnerFault("merge", f"expected the id of a piece, got {strange[0]}")
    return merged


def _inside(text: str, known: Mapping[str, int]) -> list[str]:
    """Tokens of two characters and more that a text contains."""
    longest = max(map(len, known), default=0)
    spans = ((at, stop) for at in range(len(text)) for stop in range(at + 2, min(at + longest, len(text)) + 1))
    return list(dict.fromkeys(text[at:stop] for at, stop in spans if text[at:stop] in known))


@cache
def _model_of(encoder: ByteLevelBPE) -> tuple[list[str], dict[str, int], dict[tuple[str, str], int]]:
    """Texts by id, ids by text, and ranks of merges, as the library has them."""
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
