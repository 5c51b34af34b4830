"""Zeros where a file must hold weights, as after an interrupted download in a file that has its whole length.

    up to the end of the file          refused when a model is opened; costs one page of a file that has none
    at the end of a tensor that is     refused if they go on in the next tensor and either end is inside a tensor; else
    read, before other numbers         a warning names the tensor, since layers may be zero until they are trained

Biases, zero points, gains that are stored less one and the logarithm of a decay may be zero. So may rows of tokens that
no text has, and neurons that pad a layer, whose rows are zero in gate and up projection alike. Fewer than 32 bytes, or
an eighth of a row, prove nothing at the end of a file: sparse models have such rows.

Source: aria2 manual, `--file-allocation` (a file gets its whole length first, and `--split` fills it in parts).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np

from llorch.files.folder import SafetensorsFolder, file_inside
from llorch.files.gguf import GGUFFile
from llorch.files.mapped import Entry, TensorFile, note_once
from llorch.files.packed import Packed, has_codes
from llorch.files.quantised import QuantisedFolder
from llorch.files.strict_json import read_json
from llorch.files.tensor_storage import AS_IS, expert_of
from llorch.runtime.errors import FormatError

_FEWEST_BYTES, _FEWEST_NUMBERS = 32, 8
_PART_OF_ROW = 8  # an eighth
_PART_OF_VOCABULARY = 16  # a sixteenth of the rows may be padding, if no vocabulary tells
_READ_FIRST, _READ_AT_ONCE = 1 << 12, 1 << 22  # bytes of the search for the first zero
_MAX_TOKENIZER = 1 << 28
_CODES_AND_SCALES = frozenset({"codes", "qweight", "weight", "scale", "scales", "global", "absmax"})
_WITH_TEXT = (1, 6)  # tokenizer.ggml.token_type of normal tokens and of bytes
_PARTNERS = {"up_proj": "gate_proj", "gate_proj": "up_proj", "ffn_up": "ffn_gate", "ffn_gate": "ffn_up"}
_REMEDY = "download the file again, or compare its SHA-256 with the publisher's"


class ZeroSearch:
    """The search for zeros in the weights of one model; a tensor is looked at once."""

    def __init__(self, source: GGUFFile | SafetensorsFolder, weights: Mapping[str, str]) -> None:
        """Prepare; `weights` has the short name of the weight in each tensor that must not end with zeros."""
        self._source = source
        self._weights = weights
        self._searched: set[tuple[str, int | None]] = set()
        self._warned = False

    def search_ends_of_files(self) -> None:
        """Refuse (Truncated) a file that is zero from a weight on, or from a place inside a weight, to its end."""
        for entries in self._source.entries_by_file():
            for entry, n_zero in zeros_at_end(entries, self._source.raw):
                if entry.name in self._stored and self._is_damage(entry, n_zero):
                    raise refusal(entry, n_zero, self._source.file_of(entry.name))

    def search(self, tensor: str, expert: int | None = None) -> None:
        """Look at the end of a tensor, or of one matrix of a stack; FormatError Truncated, or a warning."""
        if tensor not in self._weights or (tensor, expert) in self._searched:
            return
        self._searched.add((tensor, expert))
        stored = self._rows(tensor, expert)
        label = tensor if expert is None else f"{tensor}, expert {expert}"
        n_rows, n_zero = stored.shape[0], zero_rows(stored)
        if n_zero < min(n_rows, 1 if stored.shape[1] > 1 else _FEWEST_NUMBERS):
            self._search_constant(stored, label)
        elif not self._is_padding(tensor, n_zero, n_rows, lambda partner: zero_rows(self._rows(partner, expert))):
            actual = _zeros_from(n_rows - n_zero, stored.shape)
            if self._goes_on(tensor, expert, is_whole=n_zero == n_rows):
                actual += " and at the beginning of the next tensor, as after an interrupted download"
                message = f"{label}: expected numbers, got {actual}; {_REMEDY}"
                raise FormatError("Truncated", message, path=self._source.file_of(tensor))
            self._warn(f"{label}: expected numbers, got {actual}, and other numbers after them")

    def _rows(self, tensor: str, expert: int | None = None) -> Packed:
        """Return a tensor as rows, in the order of its file; the numbers of a vector are its rows."""
        stored = self._source.packed(tensor)
        stored = stored if expert is None else expert_of(stored, AS_IS, expert)
        if len(stored.shape) == 2:
            return stored
        width = 1 if len(stored.shape) == 1 and not has_codes(stored.ggml_type) else stored.shape[-1]
        return replace(stored, shape=(prod(stored.shape) // width, width))

    def _search_constant(self, stored: Packed, label: str) -> None:
        """Warn about a matrix whose numbers are all equal; those of a vector may be."""
        n_rows, width = stored.shape
        if min(n_rows, width) == 1:
            return
        last = stored.decode_rows(slice(n_rows - 1, n_rows))
        if (last == last[0, 0]).all() and all((tile == last[0, 0]).all() for _, tile in stored.tiles()):
            self._warn(f"{label}: expected different numbers, got {last[0, 0]:g} everywhere")

    def _warn(self, message: str) -> None:
        """Name the first weight that may be damaged."""
        if not self._warned:
            self._warned = True
            note_once(self._source.path, f"{message}; {_REMEDY}")

    @cached_property
    def _stored(self) -> Mapping[str, str]:
        """Map the tensors of the files to weights; of a quantised matrix, its codes and scales."""
        source = self._source
        if not isinstance(source, QuantisedFolder):
            return self._weights
        parts = {tensor: matrix.parts for tensor, matrix in source.matrices.items()}
        return {
            part: weight
            for tensor, weight in self._weights.items()
            for role, part in parts.get(tensor, {"weight": tensor}).items()
            if role in _CODES_AND_SCALES
        }

    def _is_damage(self, entry: Entry, n_zero: int) -> bool:
        """Tell if no undamaged tensor has so many zero bytes at the end of a file."""
        n_rows, row_bytes = _rows_of(entry)
        if n_zero < min(_FEWEST_BYTES, entry.n_bytes):
            return False
        if n_rows == 1:
            return True
        if n_zero < row_bytes:
            end = entry.n_bytes - row_bytes
            before = self._source.raw(entry.name)[end - n_zero : end]  # columns that pad a layer are zero in all rows
            return n_zero * _PART_OF_ROW >= row_bytes and bool(before.any())
        return not self._is_padding(entry.name, n_zero // row_bytes, n_rows, self._zero_rows_in_bytes)

    def _zero_rows_in_bytes(self, tensor: str) -> int:
        entry = next(entry for entry in self._file_with(tensor) if entry.name == tensor)
        return _zero_bytes(self._source.raw(tensor)) // _rows_of(entry)[1]

    def _file_with(self, tensor: str) -> Sequence[Entry]:
        return next(file for file in self._source.entries_by_file() if any(entry.name == tensor for entry in file))

    def _is_padding(self, tensor: str, n_zero: int, n_rows: int, zero_rows_of: Callable[[str], int]) -> bool:
        """Tell if zero rows at the end are of tokens without a text, or of neurons that pad a layer."""
        weight = self._stored.get(tensor) or self._weights[tensor]
        if weight in ("embed_tokens", "lm_head"):
            return n_rows - n_zero >= self._n_tokens(n_rows)
        if n_zero == n_rows or not weight.endswith(("gate_proj", "up_proj")):
            return False
        names = (tensor.replace(part, other) for part, other in _PARTNERS.items() if part in tensor)
        partner = next((name for name in names if name in self._stored or name in self._weights), None)
        return partner is not None and zero_rows_of(partner) == n_zero

    def _n_tokens(self, n_rows: int) -> int:
        """Count the rows up to the last one of a token with a text."""
        source = self._source
        ids = _text_ids(source.metadata) if isinstance(source, GGUFFile) else _text_ids_of_folder(source.path)
        return n_rows - n_rows // _PART_OF_VOCABULARY if len(ids) == 0 else int(max(ids)) + 1

    def _goes_on(self, tensor: str, expert: int | None, *, is_whole: bool) -> bool:
        """Tell if zeros at the end of a tensor go on behind it, and begin or end inside a tensor."""
        if isinstance(self._source, QuantisedFolder):  # whose matrices are several tensors
            return False
        stack = self._source.tensors[tensor].shape
        if expert is not None and expert + 1 < stack[0]:
            after = self._rows(tensor, expert + 1)
        else:
            names = [entry.name for entry in self._file_with(tensor)]
            later = [name for name in names[names.index(tensor) + 1 :] if name in self._weights]
            if not later:
                return not is_whole
            after = self._rows(later[0])
        return not after.decode_rows(slice(0, 1)).any() and not (is_whole and zero_rows(after) == after.shape[0])


def zeros_at_end(entries: Sequence[Entry], raw: Callable[[str], np.ndarray]) -> Iterator[tuple[Entry, int]]:
    """Yield each tensor that ends in the zeros at the end of its file, in order, and its number of zero bytes."""
    touched = []
    for entry in reversed(entries):
        n_zero = _zero_bytes(raw(entry.name))
        touched.append((entry, n_zero))
        if n_zero < entry.n_bytes:
            break
    yield from ((entry, n_zero) for entry, n_zero in reversed(touched) if n_zero)


def require_folder_written(path: Path) -> None:
    """Refuse (Truncated) a quantised folder whose reader failed, if a matrix or norm ends in the zeros of a file."""
    with SafetensorsFolder(path) as folder:
        for entries in folder.entries_by_file():
            for entry, n_zero in zeros_at_end(entries, folder.raw):
                is_matrix = len(entry.shape) > 1 and "zero" not in entry.name  # zero points may be zero
                is_needed = is_matrix or entry.name.endswith("norm.weight")
                if is_needed and n_zero >= min(_FEWEST_BYTES, entry.n_bytes):
                    raise refusal(entry, n_zero, folder.file_of(entry.name))


def require_adapter_written(file: TensorFile) -> None:
    """Refuse (Truncated) an adapter that is zero from a place in a lora_A to its end; a fresh lora_B is zero."""
    entries = sorted(file.tensors.values(), key=lambda entry: entry.offset)
    for entry, n_zero in zeros_at_end(entries, file.raw):
        is_random = ".lora_a" in entry.name.lower() and not entry.name.startswith("token_embd.")
        if is_random and n_zero >= min(_FEWEST_BYTES, entry.n_bytes):
            raise refusal(entry, n_zero, file.path)


def refusal(entry: Entry, n_zero: int, path: Path) -> FormatError:
    """Build (not raise) the error for a tensor that ends in the zeros at the end of its file."""
    n_rows, row_bytes = _rows_of(entry)
    n_rows, row_bytes = (n_rows, row_bytes) if n_rows > 1 else (prod(entry.shape), entry.n_bytes // prod(entry.shape))
    start = entry.n_bytes - n_zero
    actual = _zeros_from(-(-start // row_bytes), (n_rows, entry.shape[-1] if len(entry.shape) > 1 else 1))
    actual += " and in the rest of the file, as after an interrupted download"
    message = f"{entry.name}: expected numbers, got {actual}; {_REMEDY}"
    return FormatError("Truncated", message, path=path, offset=entry.offset + start)


def zero_rows(stored: Packed) -> int:
    """Count the rows at the end of a matrix that decode to zero; one row is decoded of a matrix that has none."""
    return _count_zeros(
        stored.shape[0], lambda rows: stored.decode_rows(rows).any(axis=1), first=1, most=stored.rows_at_once
    )


def _zero_bytes(raw: np.ndarray) -> int:
    """Count the zero bytes at the end."""
    return _count_zeros(raw.size, lambda span: raw[span], first=_READ_FIRST, most=_READ_AT_ONCE)


def _count_zeros(size: int, read: Callable[[slice], np.typing.ArrayLike], *, first: int, most: int) -> int:
    """Count the zeros at the end of `size` numbers; `first` and then more of them are read at a time."""
    stop, step = size, first
    while stop:
        start = max(0, stop - step)
        nonzero = np.flatnonzero(read(slice(start, stop)))
        if nonzero.size:
            return size - start - int(nonzero[-1]) - 1
        stop, step = start, min(2 * step, most)
    return size


def _rows_of(entry: Entry) -> tuple[int, int]:
    """Return the number of rows, and the bytes of a row; a vector is one row."""
    n_rows = max(1, prod(entry.shape[:-1]))
    return n_rows, entry.n_bytes // n_rows


def _zeros_from(first: int, shape: tuple[int, ...]) -> str:
    """Say from which row of a matrix, or number of a vector, on there are zeros."""
    n_rows, unit = shape[0], "row" if shape[1] > 1 else "number"
    if first == n_rows:
        return f"zeros in the last {unit}"
    return f"zeros from {unit} {first} of {n_rows} on" if first else f"zeros in all {n_rows} {unit}s"


def _text_ids(metadata: Mapping[str, object]) -> Sequence[int] | np.ndarray:
    """Return the ids of tokens with a text in a GGUF file; none if it has no types of tokens."""
    types = metadata.get("tokenizer.ggml.token_type")
    return np.flatnonzero(np.isin(types, _WITH_TEXT)) if isinstance(types, np.ndarray) else ()


def _text_ids_of_folder(folder: Path) -> Sequence[int]:
    """Return the ids of the vocabulary that are no added tokens; none without a tokenizer.json."""
    if not (folder / "tokenizer.json").is_file():
        return ()
    match read_json(file_inside(folder, "tokenizer.json"), limit=_MAX_TOKENIZER):
        case {"model": {"vocab": dict(vocabulary)}, **others}:
            ids = [token_id for token_id in vocabulary.values() if isinstance(token_id, int)]
        case {"model": {"vocab": list(vocabulary)}, **others}:
            ids = [*range(len(vocabulary))]
        case _:
            return ()
    added = others.get("added_tokens")
    special = {one.get("id") for one in added if isinstance(one, dict)} if isinstance(added, list) else set()
    return [token_id for token_id in ids if token_id not in special]
