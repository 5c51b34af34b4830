"""llorch's dump format, which every language can write: raw little-endian arrays, and an index with a JSON per line.

    {"llorch_dump": 1, "engine": "mine", "dtype": "float32", "kv_cache": "float16"}
    {"pass": 0, "ids": [9, 4, 7], "first_position": 0}
    {"name": "q_rot", "layer": 0, "dtype": "f32", "shape": [3, 8, 64], "file": "data.bin", "offset": 4096}

The first line identifies the format. Optional keys are the attributes of `Features`, and `weights`: SHA-256 of decoded
tensors. A pass is one call of the engine's forward; its line precedes the lines of its arrays. `ids` of a batch are one
list for each row, and `attention_mask` marks padding, see `llorch.engines.dumps.batch`. Optional keys of an
array: `layer`, `pass` (default: the pass begun last), `strides` in bytes, `tokens` (indices in the pass) or absolute
`positions`, `axes`, and `op`, ggml's operation. Arrays of a pass may share name and layer only if they have an `op`.

The index names files in its own folder. If the last line is incomplete, because the writer crashed, it is ignored with
a note. Every array lies inside its file, and its elements do not overlap, so reading an array never needs more memory
than the size of its file.
"""

import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from llorch.engines.dumps.batch import read_batch_pass
from llorch.engines.dumps.raw import (
    BatchPass,
    RawArray,
    RawDump,
    Stored,
    float_type,
    require_dtype,
    require_name,
    require_shape,
)
from llorch.engines.dumps.stage_dump import Features
from llorch.engines.dumps.tensor_files import from_npy_folder, open_npy, open_npz, open_safetensors_dump
from llorch.files.folder import file_inside
from llorch.files.mapped import read_regular
from llorch.files.strict_json import parse_json
from llorch.runtime.errors import FormatError, suggestion
from llorch.runtime.fields import Fields
from llorch.stages.stage_ref import Tokens

INDEX = "index.jsonl"
_OPEN = {".safetensors": open_safetensors_dump, ".npz": open_npz, ".npy": open_npy}
_MAX_INDEX = 32 << 20  # bytes
_MAX_LINES = 100_000
_ACTIVATIONS = ("F16", "BF16", "Q8_0", "Q8_1", "Q8_K")  # types to which ggml rounds the inputs of products
_HEADER = ("llorch_dump", "engine", "dtype", "kv_cache", "activations", "flash_attention", "weights")
_PASS = ("pass", "ids", "first_position", "attention_mask")
_ARRAY = (
    "name", "layer", "pass", "dtype", "shape", "file", "offset", "strides", "tokens", "positions", "axes", "op",
)  # fmt: skip


def open_raw(path: str | Path) -> RawDump:
    """Open a folder with `index.jsonl` or of .npy files, or a .safetensors, .npz or .npy file.

    Return the arrays by the names of the engine that wrote them; each is read only when it is used. FormatError if it
    is no valid dump; FileNotFoundError if it does not exist. No code in a dump is executed, and no file outside the
    folder is opened.
    """
    path = Path(path)
    if path.is_dir():
        return _IndexReader(path).read() if (path / INDEX).exists() else from_npy_folder(path)
    if path.name == INDEX:
        return _IndexReader(path.parent).read()
    if path.suffix not in _OPEN:
        path.stat()  # raises FileNotFoundError before FormatError
        expected = f"a folder with {INDEX} or of .npy files, or a .safetensors, .npz or .npy file"
        raise FormatError("Unsupported", f"expected {expected}", path=path)
    return _OPEN[path.suffix](path)


class _IndexReader:
    """Reader of a folder's index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.passes: list[Tokens] = []
        self.batch: list[BatchPass] = []
        self.arrays: list[tuple[int, RawArray]] = []
        self.notes: list[str] = []
        self._names: set[tuple[object, ...]] = set()
        self._files: dict[str, tuple[Path, int]] = {}

    def read(self) -> RawDump:
        """Read the header and all lines of the index, but no arrays."""
        lines = self._read_lines()
        header = next(lines, None)
        if header is None or not header.has("llorch_dump"):
            raise FormatError("Malformed", 'the first line must be {"llorch_dump": 1, ...}', path=self.path / INDEX)
        features, weights = _read_features(header), _read_weight_hashes(header)
        for line in lines:
            if line.has("name"):
                self._add_array(line)
            else:
                self._begin_pass(line)
        if not self.arrays:
            raise FormatError("Missing", "the index names no array", path=self.path / INDEX)
        source = str(self.path)
        passes = () if self.batch else tuple(self.passes)
        return RawDump(source, tuple(self.arrays), passes, features, weights, tuple(self.notes), tuple(self.batch))

    def _read_lines(self) -> Iterator[Fields]:
        """Yield the objects of the index; ignore an incomplete last line with a note."""
        data = read_regular(self.path / INDEX, limit=_MAX_INDEX)
        if data.count(b"\n") > _MAX_LINES:
            raise FormatError("TooLarge", f"more than {_MAX_LINES} lines", path=self.path / INDEX)
        for number, line in enumerate(io.BytesIO(data), 1):
            line_source = f"{self.path / INDEX}, line {number}"
            try:
                parsed = parse_json(line, what="the line", path=line_source)
            except FormatError as error:
                if line.endswith(b"\n") or error.code != "Malformed" or number == 1:
                    raise
                self.notes.append(f"line {number} of {INDEX} is cut off; llorch read the lines before it")
                return
            if not isinstance(parsed, dict):
                raise FormatError("Malformed", f"expected an object, got {type(parsed).__name__}", path=line_source)
            yield Fields(parsed, line_source)

    def _begin_pass(self, line: Fields) -> None:
        _require_known_keys(line, _PASS)
        if line.integer("pass") != len(self.passes):
            raise line.error("Malformed", "pass", f"{len(self.passes)} (the next number)", line.integer("pass"))
        ids = line.values.get("ids")
        if self.batch or line.has("attention_mask") or (isinstance(ids, list) and ids and isinstance(ids[0], list)):
            if len(self.passes) > len(self.batch):
                raise line.error("Inconsistent", "ids", "one list, as in the earlier passes", ids)
            self.batch.append(read_batch_pass(line, self.batch))
            self.passes.append(Tokens(max(self.batch[-1].ids, key=len)))  # indices of tokens count padding
            return
        ids = _read_counts(line, "ids")
        if not ids or max(ids) >= 2**31:
            raise line.error("Malformed", "ids", "the token ids of the pass", list(ids))
        self.passes.append(Tokens(ids, line.integer("first_position", default=0, low=0)))

    def _add_array(self, line: Fields) -> None:
        _require_known_keys(line, _ARRAY)
        name = require_name(line.text("name"), line.path)
        number = line.integer("pass", default=max(len(self.passes) - 1, 0), low=0)
        if number and number >= len(self.passes):
            expected = f"one of the {len(self.passes)} passes that the lines above begin"
            raise line.error("Missing", "pass", expected, number)
        location = self._read_location(line, name)
        array = RawArray(
            name, location.dtype, location.shape, location.read,
            layer=line.integer("layer", low=0) if line.has("layer") else None,
            tokens=self._read_tokens(line, number, location.shape),
            axes=_read_axes(line, location.shape),
            op=line.text("op", default=""),
        )  # fmt: skip
        key = (number, array.layer, name)
        if key in self._names and not array.op:
            layer_note = "" if array.layer is None else f" of layer {array.layer}"
            message = f"{name}{layer_note} is there twice in pass {number}; begin a pass for every call of the forward"
            raise FormatError("Duplicate", message, path=line.path)
        self._names.add(key)
        self.arrays.append((number, array))

    def _read_location(self, line: Fields, name: str) -> Stored:
        """Read the location of an array from its line: file, offset, dtype, shape, strides."""
        dtype, shape = require_dtype(line.text("dtype"), name, line.path), _read_counts(line, "shape")
        require_shape(shape, name, line.path)
        strides = _read_counts(line, "strides") if line.has("strides") else None
        if strides is not None and len(strides) != len(shape):
            raise line.error("Malformed", "strides", f"{len(shape)} strides, one for each axis", list(strides))
        file = line.text("file")
        if file not in self._files:
            path = file_inside(self.path, file)
            if not path.is_file():
                raise FormatError("Unsupported", f"{file} is no regular file", path=line.path)
            self._files[file] = (path, path.stat().st_size)
        path, size = self._files[file]
        location = Stored(path, line.integer("offset", default=0, low=0), dtype, shape, strides)
        if location.overlaps:
            raise line.error("Malformed", "strides", "strides without overlapping elements", list(strides or ()))
        if location.end > size:
            message = f"{name}, {dtype} {list(shape)}, ends at byte {location.end} of {file}, which has {size} bytes"
            raise FormatError("Truncated", message, path=line.path)
        return location

    def _read_tokens(self, line: Fields, number: int, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Read the token indices of an array from `tokens` or `positions`; None if the line has neither."""
        keys = [key for key in ("tokens", "positions") if line.has(key)]
        if not keys:
            return None
        key, indices = keys[0], _read_counts(line, keys[0])
        if len(keys) == 2 or (key == "positions" and (self.batch or number >= len(self.passes))):
            expected = "either tokens, or positions in a pass of one row that a line above begins"
            raise line.error("Malformed", key, expected, list(indices))
        if key == "positions":
            indices = tuple(index - self.passes[number].first_position for index in indices)
        n_tokens = len(self.passes[number].ids) if number < len(self.passes) else 2**31  # no pass line: unknown
        if len(set(indices)) < len(indices) or not all(0 <= index < n_tokens for index in indices):
            raise line.error("OutOfRange", key, f"different tokens of pass {number}", list(indices))
        if len(indices) != 1 and len(indices) not in shape:  # an array of one token may lack the axis
            raise line.error("Inconsistent", key, f"as many tokens as an axis of {list(shape)}", list(indices))
        return indices


def _read_features(header: Fields) -> Features:
    """Read the engine's declared arithmetic from the first line, and check the version of the format."""
    _require_known_keys(header, _HEADER)
    if (version := header.integer("llorch_dump")) != 1:
        raise header.error("Unsupported", "llorch_dump", "version 1", version)
    return Features(
        engine=header.text("engine", default=""),
        dtype=float_type(header, "dtype"),
        kv_cache=float_type(header, "kv_cache"),
        activations=_read_activations(header),
        flash_attention=header.boolean("flash_attention", default=False),
    )


def _read_activations(header: Fields) -> str:
    text = header.text("activations", default="").upper()
    if text and text not in _ACTIVATIONS:
        raise header.error("Unsupported", "activations", f"{', '.join(_ACTIVATIONS)} or nothing", text)
    return text


def _read_weight_hashes(header: Fields) -> dict[str, str]:
    section = header.section("weights")
    hashes = {} if section is None else {name: section.text(name).lower() for name in section.values}
    for name, hash_text in hashes.items():
        if not re.fullmatch("[0-9a-f]{64}", hash_text):
            raise header.error("Malformed", f"weights of {name!r:.80}", "a SHA-256 of 64 hexadecimal digits", hash_text)
    return hashes


def _read_axes(line: Fields, shape: tuple[int, ...]) -> tuple[str, ...]:
    spec = line.values.get("axes") or ""
    axes = tuple(spec.split() if isinstance(spec, str) else spec if isinstance(spec, list) else (spec,))
    names = tuple(axis for axis in axes if isinstance(axis, str))
    if axes and (len(names) != len(shape) or names != axes):
        raise line.error("Malformed", "axes", f"{len(shape)} names", spec)
    return names


def _read_counts(line: Fields, key: str) -> tuple[int, ...]:
    """Read a required list of integers >= 0."""
    counts = line.values.get(key)
    if not isinstance(counts, list) or not all(type(count) is int and 0 <= count < 2**63 for count in counts):
        raise line.error("Malformed", key, "a list of integers of at least 0", counts)
    return tuple(counts)


def _require_known_keys(line: Fields, allowed: Iterable[str]) -> None:
    for key in line.values.keys() - set(allowed):
        message = f"{key[:80]!r} is not a key of such a line{suggestion(key, allowed)}"
        raise FormatError("Unexpected", message, path=line.path)
