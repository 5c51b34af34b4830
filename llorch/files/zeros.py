"""Search for zeros in place of weights, as after an interrupted download into a preallocated file.

    zeros to the end of the file       Truncated when a model is opened; reads one page of a file without zeros
    zeros at the end of a tensor,      Truncated at reading if they continue in the next tensor and start or end inside
    followed by other values           a tensor; else a warning, because untrained layers may be zero

Biases, zero points, norm weights with an offset and the logarithm of a decay may be zero. So may embeddings of unused
tokens, and padding neurons, whose rows are zero in gate and up projection. Fewer than 32 bytes, or an eighth of a row,
are not enough at the end of a file: sparse models have such rows.

Source: aria2 manual, `--file-allocation` (preallocates a file, and `--split` fills it in parts).
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
from llorch.files.tensor_storage import AS_IS, select_expert
from llorch.runtime.errors import FormatError

_FEWEST_BYTES, _FEWEST_NUMBERS = 32, 8  # at the end of a file, at the end of a vector: fewer zeros may be values
_PART_OF_ROW = 8  # an eighth
_PART_OF_VOCABULARY = 16  # a sixteenth of the rows may be padding, if the vocabulary is unknown
_READ_FIRST, _READ_AT_ONCE = 1 << 12, 1 << 22  # bytes read first (one page), and at most at once, from the end
_MAX_TOKENIZER = 1 << 28  # bytes
_CODES_AND_SCALES = frozenset({"codes", "qweight", "weight", "scale", "scales", "global", "absmax"})  # not zero points
_WITH_TEXT = (1, 6)  # tokenizer.ggml.token_type of normal and byte tokens
_PARTNERS = {"up_proj": "gate_proj", "gate_proj": "up_proj", "ffn_up": "ffn_gate", "ffn_gate": "ffn_up"}
_REMEDY = "download the file again, or compare its SHA-256 with the publisher's"


class ZeroSearch:
    """Search for zeros in the weights of one model; each tensor is checked once."""

    def __init__(self, source: GGUFFile | SafetensorsFolder, weights: Mapping[str, str]) -> None:
        """Store the arguments; `weights` maps tensors that must not end with zeros to short names of weights."""
        self._source = source
        self._weights = weights
        self._searched: set[tuple[str, int | None]] = set()
        self._warned = False

    def search_ends_of_files(self) -> None:
        """Raise Truncated for a file that is zero from a weight, or a position inside a weight, to its end."""
        for entries in self._source.entries_by_file():
            for entry, n_zero in zeros_at_end(entries, self._source.raw):
                if entry.name in self._weight_by_stored and self._is_damage(entry, n_zero):
                    raise refusal(entry, n_zero, self._source.file_of(entry.name))

    def search(self, tensor: str, expert: int | None = None) -> None:
        """Check the end of a tensor, or of one matrix of a stack; FormatError Truncated, or a warning."""
        if tensor not in self._weights or (tensor, expert) in self._searched:
            return
        self._searched.add((tensor, expert))
        packed = self._rows(tensor, expert)
        label = tensor if expert is None else f"{tensor}, expert {expert}"
        n_rows, n_zero = packed.shape[0], zero_rows(packed)
        if n_zero < min(n_rows, 1 if packed.shape[1] > 1 else _FEWEST_NUMBERS):
            self._search_constant(packed, label)
        elif not self._is_padding(tensor, n_zero, n_rows, lambda partner: zero_rows(self._rows(partner, expert))):
            actual = _zeros_from(n_rows - n_zero, packed.shape)
            if self._continues(tensor, expert, is_all_zero=n_zero == n_rows):
                actual += " and at the beginning of the next tensor, as after an interrupted download"
                message = f"{label}: expected numbers, got {actual}; {_REMEDY}"
                raise FormatError("Truncated", message, path=self._source.file_of(tensor))
            self._warn(f"{label}: expected numbers, got {actual}, and other numbers after them")

    def _rows(self, tensor: str, expert: int | None = None) -> Packed:
        """Return a tensor as rows, in the order of its file; each element of a vector is a row."""
        packed = self._source.packed(tensor)
        packed = packed if expert is None else select_expert(packed, AS_IS, expert)
        if len(packed.shape) == 2:
            return packed
        width = 1 if len(packed.shape) == 1 and not has_codes(packed.ggml_type) else packed.shape[-1]
        return replace(packed, shape=(prod(packed.shape) // width, width))

    def _search_constant(self, packed: Packed, label: str) -> None:
        """Warn about a constant matrix; a vector may be constant."""
        n_rows, width = packed.shape
        if min(n_rows, width) == 1:
            return
        last_row = packed.decode_rows(slice(n_rows - 1, n_rows))
        if (last_row == last_row[0, 0]).all() and all((tile == last_row[0, 0]).all() for _, tile in packed.tiles()):
            self._warn(f"{label}: expected different numbers, got {last_row[0, 0]:g} everywhere")

    def _warn(self, message: str) -> None:
        """Warn about the first weight that may be damaged, not about later ones."""
        if not self._warned:
            self._warned = True
            note_once(self._source.path, f"{message}; {_REMEDY}")

    @cached_property
    def _weight_by_stored(self) -> Mapping[str, str]:
        """Map stored tensors to weights; a quantised matrix is stored as codes and scales."""
        source = self._source
        if not isinstance(source, QuantisedFolder):
            return self._weights
        stored_names = {tensor: matrix.parts for tensor, matrix in source.matrices.items()}
        return {
            stored_name: weight
            for tensor, weight in self._weights.items()
            for role, stored_name in stored_names.get(tensor, {"weight": tensor}).items()
            if role in _CODES_AND_SCALES
        }

    def _is_damage(self, entry: Entry, n_zero: int) -> bool:
        """Check if an undamaged tensor cannot have so many zero bytes at the end of a file."""
        n_rows, row_bytes = _count_rows(entry)
        if n_zero < min(_FEWEST_BYTES, entry.n_bytes):
            return False
        if n_rows == 1:
            return True
        if n_zero < row_bytes:
            end = entry.n_bytes - row_bytes
            columns_before = self._source.raw(entry.name)[end - n_zero : end]  # padding columns are zero in all rows
            return n_zero * _PART_OF_ROW >= row_bytes and bool(columns_before.any())
        return not self._is_padding(entry.name, n_zero // row_bytes, n_rows, self._zero_rows_in_bytes)

    def _zero_rows_in_bytes(self, tensor: str) -> int:
        entry = next(entry for entry in self._file_with(tensor) if entry.name == tensor)
        return _zero_bytes(self._source.raw(tensor)) // _count_rows(entry)[1]

    def _file_with(self, tensor: str) -> Sequence[Entry]:
        return next(file for file in self._source.entries_by_file() if any(entry.name == tensor for entry in file))

    def _is_padding(self, tensor: str, n_zero: int, n_rows: int, count_zero_rows: Callable[[str], int]) -> bool:
        """Check if zero rows at the end belong to unused tokens, or to padding neurons."""
        weight = self._weight_by_stored.get(tensor) or self._weights[tensor]
        if weight in ("embed_tokens", "lm_head"):
            return n_rows - n_zero >= self._n_tokens(n_rows)
        if n_zero == n_rows or not weight.endswith(("gate_proj", "up_proj")):
            return False
        names = (tensor.replace(part, partner_part) for part, partner_part in _PARTNERS.items() if part in tensor)
        partner = next((name for name in names if name in self._weight_by_stored or name in self._weights), None)
        return partner is not None and count_zero_rows(partner) == n_zero

    def _n_tokens(self, n_rows: int) -> int:
        """Count the rows up to the last token with a text."""
        source = self._source
        ids = _text_ids(source.metadata) if isinstance(source, GGUFFile) else _text_ids_of_folder(source.path)
        return n_rows - n_rows // _PART_OF_VOCABULARY if len(ids) == 0 else int(max(ids)) + 1

    def _continues(self, tensor: str, expert: int | None, *, is_all_zero: bool) -> bool:
        """Check if zeros at the end of a tensor continue in the next one, and start or end inside a tensor."""
        if isinstance(self._source, QuantisedFolder):  # its matrices are several tensors each
            return False
        stack = self._source.tensors[tensor].shape
        if expert is not None and expert + 1 < stack[0]:
            rows = self._rows(tensor, expert + 1)
        else:
            names = [entry.name for entry in self._file_with(tensor)]
            later = [name for name in names[names.index(tensor) + 1 :] if name in self._weights]
            if not later:
                return not is_all_zero
            rows = self._rows(later[0])
        return not rows.decode_rows(slice(0, 1)).any() and not (is_all_zero and zero_rows(rows) == rows.shape[0])


def zeros_at_end(entries: Sequence[Entry], raw: Callable[[str], np.ndarray]) -> Iterator[tuple[Entry, int]]:
    """Yield the tensors within the zeros at the end of a file, in order, each with its number of zero bytes."""
    zero_entries = []
    for entry in reversed(entries):
        n_zero = _zero_bytes(raw(entry.name))
        zero_entries.append((entry, n_zero))
        if n_zero < entry.n_bytes:
            break
    yield from ((entry, n_zero) for entry, n_zero in reversed(zero_entries) if n_zero)


def require_folder_written(path: Path) -> None:
    """Raise Truncated if a matrix or norm of a quantised folder ends in the zeros at the end of a file."""
    with SafetensorsFolder(path) as folder:
        for entries in folder.entries_by_file():
            for entry, n_zero in zeros_at_end(entries, folder.raw):
                is_matrix = len(entry.shape) > 1 and "zero" not in entry.name  # zero points may be zero
                is_needed = is_matrix or entry.name.endswith("norm.weight")
                if is_needed and n_zero >= min(_FEWEST_BYTES, entry.n_bytes):
                    raise refusal(entry, n_zero, folder.file_of(entry.name))


def require_adapter_written(file: TensorFile) -> None:
    """Raise Truncated for an adapter file that is zero from a position in a lora_A to its end."""
    entries = sorted(file.tensors.values(), key=lambda entry: entry.offset)
    for entry, n_zero in zeros_at_end(entries, file.raw):
        # Initial values: A is random and B is zero, for the embedding the opposite.
        is_random = ".lora_a" in entry.name.lower() and not entry.name.startswith("token_embd.")
        if is_random and n_zero >= min(_FEWEST_BYTES, entry.n_bytes):
            raise refusal(entry, n_zero, file.path)


def refusal(entry: Entry, n_zero: int, path: Path) -> FormatError:
    """Return (not raise) the error for a tensor that ends in the zeros at the end of its file."""
    n_rows, row_bytes = _count_rows(entry)
    n_rows, row_bytes = (n_rows, row_bytes) if n_rows > 1 else (prod(entry.shape), entry.n_bytes // prod(entry.shape))
    start = entry.n_bytes - n_zero
    actual = _zeros_from(-(-start // row_bytes), (n_rows, entry.shape[-1] if len(entry.shape) > 1 else 1))
    actual += " and in the rest of the file, as after an interrupted download"
    message = f"{entry.name}: expected numbers, got {actual}; {_REMEDY}"
    return FormatError("Truncated", message, path=path, offset=entry.offset + start)


def zero_rows(packed: Packed) -> int:
    """Count the rows at the end of a matrix that decode to zero; without zeros, only one row is decoded."""
    return _count_zeros(
        packed.shape[0], lambda rows: packed.decode_rows(rows).any(axis=1), first=1, max_size=packed.rows_at_once
    )


def _zero_bytes(raw: np.ndarray) -> int:
    """Count the zero bytes at the end of an array."""
    return _count_zeros(raw.size, lambda span: raw[span], first=_READ_FIRST, max_size=_READ_AT_ONCE)


def _count_zeros(size: int, read: Callable[[slice], np.typing.ArrayLike], *, first: int, max_size: int) -> int:
    """Count the zeros at the end of `size` numbers, read in chunks of `first` to `max_size` numbers."""
    stop, step = size, first
    while stop:
        start = max(0, stop - step)
        nonzero = np.flatnonzero(read(slice(start, stop)))
        if nonzero.size:
            return size - start - int(nonzero[-1]) - 1
        stop, step = start, min(2 * step, max_size)
    return size


def _count_rows(entry: Entry) -> tuple[int, int]:
    """Return the number of rows, and the bytes of a row; a vector is one row."""
    n_rows = max(1, prod(entry.shape[:-1]))
    return n_rows, entry.n_bytes // n_rows


def _zeros_from(first_row: int, shape: tuple[int, ...]) -> str:
    """Describe the zeros by the first row of a matrix, or the first number of a vector."""
    n_rows, unit = shape[0], "row" if shape[1] > 1 else "number"
    if first_row == n_rows:
        return f"zeros in the last {unit}"
    return f"zeros from {unit} {first_row} of {n_rows} on" if first_row else f"zeros in all {n_rows} {unit}s"


def _text_ids(metadata: Mapping[str, object]) -> Sequence[int] | np.ndarray:
    """Return the ids of tokens with a text in a GGUF file; none if it has no token types."""
    types = metadata.get("tokenizer.ggml.token_type")
    return np.flatnonzero(np.isin(types, _WITH_TEXT)) if isinstance(types, np.ndarray) else ()


def _text_ids_of_folder(folder: Path) -> Sequence[int]:
    """Return the ids of the vocabulary without added tokens; none without a tokenizer.json."""
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
    added_ids = {token.get("id") for token in added if isinstance(token, dict)} if isinstance(added, list) else set()
    return [token_id for token_id in ids if token_id not in added_ids]
