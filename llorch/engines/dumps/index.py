"""The dump that anyone can write: a folder of raw little-endian arrays and an index, a JSON object a line.

    {"llorch_dump": 1, "engine": "mine", "dtype": "float32", "kv_cache": "float16"}
    {"pass": 0, "ids": [9, 4, 7], "first_position": 0}
    {"name": "q_rot", "layer": 0, "dtype": "f32", "shape": [3, 8, 64], "file": "data.bin", "offset": 4096}

The first line says what the file is and, all optional, what `Features` has and `weights`, SHA-256 of decoded tensors.
A pass is one call of the engine's forward, its line stands before those of its arrays. Of an array may further be said:
`pass` (else the last one begun), `strides` in bytes, which `tokens` of the pass (counted from 0) or `positions` it has,
`axes`, and `op`, the node's operation; only of arrays with an `op` may two of a pass have one name and layer.

The index names files of its own folder, and is read only as far as it is complete: a program that died while it wrote
leaves half a line, which is noted. Every array lies inside its file and no two elements of it share bytes, so reading
one never takes more memory than its file.
"""

import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from llorch.engines.dumps.raw import RawArray, RawDump, Stored, known_dtype, require_dtype, require_name, require_shape
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
_ACTIVATIONS = ("F16", "BF16", "Q8_0", "Q8_1", "Q8_K")
_HEADER = ("llorch_dump", "engine", "dtype", "kv_cache", "activations", "flash_attention", "weights")
_PASS = ("pass", "ids", "first_position")
_ARRAY = (
    "name", "layer", "pass", "dtype", "shape", "file", "offset", "strides", "tokens", "positions", "axes", "op",
)  # fmt: skip


def open_raw(path: str | Path) -> RawDump:
    """Open a dump; its arrays are read one by one, when they are asked for.

    Args:
        path: A folder with `index.jsonl` or of .npy files, or a .safetensors, .npz or .npy file.

    Returns:
        What it holds, under the names of the engine that wrote it.

    Raises:
        FormatError: It is no dump, or not a sound one; nothing of it is executed, no file outside is opened.
        FileNotFoundError: There is nothing at `path`.
    """
    path = Path(path)
    if path.is_dir():
        return _Folder(path).read() if (path / INDEX).exists() else from_npy_folder(path)
    if path.name == INDEX:
        return _Folder(path.parent).read()
    if path.suffix not in _OPEN:
        path.stat()  # first of all it has to be there
        expected = f"a folder with {INDEX} or of .npy files, or a .safetensors, .npz or .npy file"
        raise FormatError("Unsupported", f"expected {expected}", path=path)
    return _OPEN[path.suffix](path)


class _Folder:
    """The folder while its index is read, line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.passes: list[Tokens] = []
        self.arrays: list[tuple[int, RawArray]] = []
        self.notes: list[str] = []
        self._names: set[tuple[object, ...]] = set()
        self._files: dict[str, tuple[Path, int]] = {}

    def read(self) -> RawDump:
        """Read the header and all lines of the index; the arrays themselves stay in the file."""
        lines = self._lines()
        header = next(lines, None)
        if header is None or not header.has("llorch_dump"):
            raise FormatError("Malformed", 'the first line must be {"llorch_dump": 1, ...}', path=self.path / INDEX)
        features, weights = _features(header), _weight_hashes(header)
        for line in lines:
            if line.has("name"):
                self._add(line)
            else:
                self._begin(line)
        if not self.arrays:
            raise FormatError("Missing", "the index names no array", path=self.path / INDEX)
        source = str(self.path)
        return RawDump(source, tuple(self.arrays), tuple(self.passes), features, weights, tuple(self.notes))

    def _lines(self) -> Iterator[Fields]:
        """Yield the objects of the index; a last line that is cut off ends it with a note."""
        data = read_regular(self.path / INDEX, limit=_MAX_INDEX)
        if data.count(b"\n") > _MAX_LINES:
            raise FormatError("TooLarge", f"more than {_MAX_LINES} lines", path=self.path / INDEX)
        for number, line in enumerate(io.BytesIO(data), 1):
            where = f"{self.path / INDEX}, line {number}"
            try:
                value = parse_json(line, what="the line", path=where)
            except FormatError as error:
                if line.endswith(b"\n") or error.code != "Malformed" or number == 1:
                    raise
                self.notes.append(f"line {number} of {INDEX} is cut off; llorch read the lines before it")
                return
            if not isinstance(value, dict):
                raise FormatError("Malformed", f"expected an object, got {type(value).__name__}", path=where)
            yield Fields(value, where)

    def _begin(self, line: Fields) -> None:
        _refuse_others(line, _PASS)
        if line.integer("pass") != len(self.passes):
            raise line.error("Malformed", "pass", f"{len(self.passes)} (the next number)", line.integer("pass"))
        ids = _counts(line, "ids")
        if not ids or max(ids) >= 2**31:
            raise line.error("Malformed", "ids", "the token ids of the pass", list(ids))
        self.passes.append(Tokens(ids, line.integer("first_position", default=0, low=0)))

    def _add(self, line: Fields) -> None:
        _refuse_others(line, _ARRAY)
        name = require_name(line.text("name"), line.path)
        number = line.integer("pass", default=max(len(self.passes) - 1, 0), low=0)
        if number and number >= len(self.passes):
            expected = f"one of the {len(self.passes)} passes that the lines above begin"
            raise line.error("Missing", "pass", expected, number)
        stored = self._stored(line, name)
        array = RawArray(
            name, stored.dtype, stored.shape, stored.read,
            layer=line.integer("layer", low=0) if line.has("layer") else None,
            tokens=self._tokens(line, number, stored.shape),
            axes=_axes(line, stored.shape),
            op=line.text("op", default=""),
        )  # fmt: skip
        key = (number, array.layer, name)
        if key in self._names and not array.op:
            where = "" if array.layer is None else f" of layer {array.layer}"
            message = f"{name}{where} is there twice in pass {number}; begin a pass for every call of the forward"
            raise FormatError("Duplicate", message, path=line.path)
        self._names.add(key)
        self.arrays.append((number, array))

    def _stored(self, line: Fields, name: str) -> Stored:
        """Read where a line of index.jsonl says that its array lies: file, offset, dtype, shape, strides."""
        dtype, shape = require_dtype(line.text("dtype"), name, line.path), _counts(line, "shape")
        require_shape(shape, name, line.path)
        strides = _counts(line, "strides") if line.has("strides") else None
        if strides is not None and len(strides) != len(shape):
            raise line.error("Malformed", "strides", f"{len(shape)} strides, one for each axis", list(strides))
        file = line.text("file")
        if file not in self._files:
            path = file_inside(self.path, file)
            if not path.is_file():
                raise FormatError("Unsupported", f"{file} is no regular file", path=line.path)
            self._files[file] = (path, path.stat().st_size)
        path, size = self._files[file]
        stored = Stored(path, line.integer("offset", default=0, low=0), dtype, shape, strides)
        if stored.overlaps:
            raise line.error("Malformed", "strides", "strides without overlapping elements", list(strides or ()))
        if stored.end > size:
            message = f"{name}, {dtype} {list(shape)}, ends at byte {stored.end} of {file}, which has {size} bytes"
            raise FormatError("Truncated", message, path=line.path)
        return stored

    def _tokens(self, line: Fields, number: int, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Read which tokens of its pass an array has, as `tokens` or `positions`; None if the line states neither."""
        keys = [key for key in ("tokens", "positions") if line.has(key)]
        if not keys:
            return None
        key, values = keys[0], _counts(line, keys[0])
        if len(keys) == 2 or (key == "positions" and number >= len(self.passes)):
            expected = "either tokens, or positions in a pass that a line above begins"
            raise line.error("Malformed", key, expected, list(values))
        if key == "positions":
            values = tuple(value - self.passes[number].first_position for value in values)
        n_tokens = len(self.passes[number].ids) if number < len(self.passes) else 2**31
        if len(set(values)) < len(values) or not all(0 <= value < n_tokens for value in values):
            raise line.error("OutOfRange", key, f"different tokens of pass {number}", list(values))
        if len(values) != 1 and len(values) not in shape:
            raise line.error("Inconsistent", key, f"as many tokens as an axis of {list(shape)}", list(values))
        return values


def _features(header: Fields) -> Features:
    _refuse_others(header, _HEADER)
    if (version := header.integer("llorch_dump")) != 1:
        raise header.error("Unsupported", "llorch_dump", "version 1", version)
    return Features(
        engine=header.text("engine", default=""),
        dtype=_dtype(header, "dtype"),
        kv_cache=_dtype(header, "kv_cache"),
        activations=_activations(header),
        flash_attention=header.boolean("flash_attention", default=False),
    )


def _dtype(header: Fields, key: str) -> str:
    text = header.text(key, default="")
    dtype = known_dtype(text) if text else ""
    if dtype is None or "int" in dtype:
        raise header.error("Unsupported", key, "float32, float16, bfloat16 or float64", text)
    return dtype


def _activations(header: Fields) -> str:
    text = header.text("activations", default="").upper()
    if text and text not in _ACTIVATIONS:
        raise header.error("Unsupported", "activations", f"{', '.join(_ACTIVATIONS)} or nothing", text)
    return text


def _weight_hashes(header: Fields) -> dict[str, str]:
    section = header.section("weights")
    found = {} if section is None else {name: section.text(name).lower() for name in section.values}
    for name, text in found.items():
        if not re.fullmatch("[0-9a-f]{64}", text):
            raise header.error("Malformed", f"weights of {name!r:.80}", "a SHA-256 of 64 hexadecimal digits", text)
    return found


def _axes(line: Fields, shape: tuple[int, ...]) -> tuple[str, ...]:
    value = line.values.get("axes") or ""
    axes = tuple(value.split() if isinstance(value, str) else value if isinstance(value, list) else (value,))
    names = tuple(axis for axis in axes if isinstance(axis, str))
    if axes and (len(names) != len(shape) or names != axes):
        raise line.error("Malformed", "axes", f"{len(shape)} names", value)
    return names


def _counts(line: Fields, key: str) -> tuple[int, ...]:
    """Read a required list of integers of at least 0."""
    values = line.values.get(key)
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise line.error("Malformed", key, "a list of integers of at least 0", values)
    return tuple(values)


def _refuse_others(line: Fields, known: Iterable[str]) -> None:
    for key in line.values.keys() - set(known):
        message = f"{key[:80]!r} is not a key of such a line{suggestion(key, known)}"
        raise FormatError("Unexpected", message, path=line.path)
