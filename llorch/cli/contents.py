"""Read the contents that `llorch inspect` shows, with a sample of each tensor, also if llorch cannot run the model.

The number types of the matrices show how each is quantised, and which matrices are floats. Some quantised formats also
round activations (inputs of matrices) and the KV cache; the settings of a folder say so.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console

from llorch.cli.inputs import has_vocabulary
from llorch.cli.tables import console, print_table, table
from llorch.files import GGUFFile, SafetensorsFolder, Weights, open_gguf
from llorch.files.opening import open_table, unread_settings
from llorch.files.packed import StoredType, has_codes
from llorch.files.quant import GGMLType
from llorch.files.quantised import QuantisedFolder, is_quantised
from llorch.files.quantised.activations import codes_of_engine
from llorch.files.strict_json import read_settings
from llorch.files.tokenizer import Tokenizer
from llorch.files.tokenizer.chat import read_templates, templates_of_metadata
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import shortest


@dataclass(frozen=True)
class MatrixType:
    """All matrices of one number type."""

    type: str
    n_matrices: int
    n_numbers: int
    n_bytes: int  # with scales, zero points and tables, as stored
    bits_per_weight: float


@dataclass(frozen=True)
class Quantisation:
    """Number types of the matrices of a file, and the roundings that its settings specify."""

    method: str
    types: list[MatrixType]  # largest first
    bits_per_weight: float  # average over all matrices
    not_quantised: list[str]  # modules whose matrices are floats
    not_quantised_in_short: list[str]  # with the numbers of layers and experts as ranges
    activations: list[str]  # roundings of the inputs of matrices
    kv_cache: list[str]  # roundings of keys and values
    not_read: str | None  # reason why llorch cannot compute the roundings of activations and KV cache


Numbers = tuple[int, ...]
Matrix = tuple[str, StoredType, tuple[int, ...], int]  # name, type, shape, bytes


def of_file(file: GGUFFile) -> Quantisation | None:
    """Summarise the types of a GGUF file; None if every matrix is floats."""
    matrices = [(name, tensor.ggml_type, tensor.shape, tensor.n_bytes) for name, tensor in file.tensors.items()]
    return _summarise("ggml", matrices, [], [], None)


def of_folder(path: Path) -> Quantisation | None:
    """Summarise the settings of a quantised Hugging Face folder; None if it is not quantised.

    Raises:
        FormatError: The folder is one that `QuantisedFolder` refuses.
    """
    values = read_settings(path / "config.json")
    if not is_quantised(values, path):
        return None
    with closing(QuantisedFolder(path, values)) as folder:
        matrices = [
            (name, folder.packed(name).ggml_type, tensor.shape, tensor.n_bytes)
            for name, tensor in folder.tensors.items()
            if tensor.holds_floats  # `open_weights` reports integer tensors that belong to no matrix
        ]
        activations, caches, not_read = [], [], None
        try:
            activations = _count_texts(map(str, folder.activations.inputs.values()))
            caches = _count_texts(str(rounding) for pair in folder.activations.caches.values() for rounding in pair)
        except FormatError as error:
            not_read = str(error)
            codes = codes_of_engine(folder.method, folder.source.settings)
            activations = [] if codes is None else [codes]
        return _summarise(folder.method, matrices, activations, caches, not_read)


def rows_of(quantisation: Quantisation) -> Mapping[str, str]:
    """Return the lines that follow the table of the types, by label."""
    rows = {"method": quantisation.method, "bits per weight, all matrices": f"{quantisation.bits_per_weight:.2f}"}
    rows["not quantised"] = ", ".join(quantisation.not_quantised_in_short) or "none"
    if quantisation.not_read is not None and quantisation.activations:
        codes = ", ".join(quantisation.activations)
        return rows | {"activations": f"the engine rounds them to {codes}; llorch does not reproduce this rounding"}
    if quantisation.not_read is not None:
        return rows | {"activations, KV cache": f"unknown: {quantisation.not_read}"}
    return rows | {
        "activations": ", ".join(quantisation.activations) or "not quantised",
        "KV cache": ", ".join(quantisation.kv_cache) or "not quantised",
    }


def _summarise(
    method: str, tensors: Iterable[Matrix], activations: list[str], caches: list[str], not_read: str | None
) -> Quantisation | None:
    """Summarise the types of quantised matrices; None if no matrix is quantised."""
    matrices = [tensor for tensor in tensors if len(tensor[2]) > 1]
    if not any(has_codes(kind) for _, kind, _, _ in matrices):
        return None
    kinds: dict[StoredType, list[Matrix]] = {}
    for matrix in matrices:
        kinds.setdefault(matrix[1], []).append(matrix)
    types = [MatrixType(kind.name, len(group), *_sizes(group)) for kind, group in kinds.items()]
    floats = [name.removesuffix(".weight") for name, kind, _, _ in matrices if not has_codes(kind)]
    return Quantisation(
        method=method, types=sorted(types, key=lambda matrix_type: -matrix_type.n_numbers),
        bits_per_weight=_sizes(matrices)[2], not_quantised=floats,
        not_quantised_in_short=in_short(floats, [name.removesuffix(".weight") for name, *_ in matrices]),
        activations=activations, kv_cache=caches, not_read=not_read,
    )  # fmt: skip


def _sizes(matrices: list[Matrix]) -> tuple[int, int, float]:
    """Count numbers and bytes, and the bits of one number."""
    n_numbers, n_bytes = sum(prod(matrix[2]) for matrix in matrices), sum(matrix[3] for matrix in matrices)
    return n_numbers, n_bytes, round(8 * n_bytes / max(1, n_numbers), 3)


def _count_texts(texts: Iterable[str]) -> list[str]:
    """List each text once, with the number of its occurrences."""
    return [_with_count(text, count) for text, count in Counter(texts).items()]


def _with_count(text: str, count: int) -> str:
    """Append the number of occurrences to a text, unless it occurs once."""
    return text if count == 1 else f"{text} ({count} times)"


def in_short(names: list[str], known_names: list[str]) -> list[str]:
    """Abbreviate module names that differ in the numbers of layers and experts: `*` for all numbers, else ranges.

    `known_names` are the names of all modules: a star means that `names` has all of them with this pattern.
    """
    groups: dict[str, set[Numbers]] = {}
    for name in names:
        groups.setdefault(_to_pattern(name), set()).add(_parse_numbers(name))
    known_groups = {pattern: set[Numbers]() for pattern in groups}
    for name in known_names:
        if (pattern := _to_pattern(name)) in groups:
            known_groups[pattern].add(_parse_numbers(name))
    short_names = []
    for pattern, numbers in groups.items():
        for texts, count in _number_texts(numbers, known_groups[pattern]):
            text = pattern.format(*texts)
            short_names.append(_with_count(text, count) if "*" in texts else text)
    return short_names


def _number_texts(subset: set[Numbers], superset: set[Numbers]) -> Iterator[tuple[list[str], int]]:
    """Yield the texts that replace the numbers of names, and how many names they cover: one pair if ranges suffice."""
    columns = [set(column) for column in zip(*subset, strict=True)]
    if prod(map(len, columns)) == len(subset):
        full = [set(column) for column in zip(*superset, strict=True)]
        yield ["*" if a == b else _ranges(a) for a, b in zip(columns, full, strict=True)], len(subset)
        return
    for first in sorted(columns[0]):
        rows, all_rows = ({row[1:] for row in part if row[0] == first} for part in (subset, superset))
        for texts, count in _number_texts(rows, all_rows):
            yield [str(first), *texts], count


def _ranges(numbers: set[int]) -> str:
    """Format numbers as `3` or `{0-2,5}`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    text = ",".join("-".join(map(str, run)) for run in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"


def _to_pattern(name: str) -> str:
    """Replace the number of a layer or an expert by a field of `str.format`."""
    escaped = name.replace("{", "{{").replace("}", "}}")
    return ".".join("{}" if part.isdecimal() else part for part in escaped.split("."))


def _parse_numbers(name: str) -> Numbers:
    """Return the numbers of the layer and the expert in a name."""
    return tuple(int(part) for part in name.split(".") if part.isdecimal())


SHOWN = 60  # characters of a long text that the tables print; --json prints it in full
SAMPLE = "Hello, world 27!"  # its ids differ between vocabularies

Result = TypeVar("Result")


@dataclass(frozen=True)
class Contents:
    """Contents of a file, as far as llorch could read it; `plain` and `print` show them."""

    path: Path
    format: str
    config: dict | None
    tokenizer: dict | None
    metadata: dict
    quantisation: Quantisation | None  # None if every matrix is floats
    tensors: list[dict]  # name, type, shape, offset, n_bytes
    sampled: int  # tensors whose last row was read; 0 if llorch cannot open the model
    unread: dict[str, object]  # settings that no rule of llorch reads, by key
    notes: list[str]  # parts of the file that llorch does not compute with
    problems: list[str]  # reasons why llorch would refuse to run it

    def plain(self) -> dict:
        """Return the contents as dictionaries, lists, numbers and texts only."""
        return asdict(self) | {"path": str(self.path)}

    def print(self) -> None:
        """Print the tables on stdout."""
        out = console()
        n_bytes = sum(tensor["n_bytes"] for tensor in self.tensors)
        n_numbers = sum(prod(tensor["shape"]) for tensor in self.tensors)
        out.print(
            f"{self.path}   {self.format}   {len(self.tensors)} tensors, {n_numbers:,} numbers, {n_bytes:,} bytes"
        )
        _pairs(out, "config", self.config and _by_row(self.config))
        _pairs(out, "tokenizer", self.tokenizer)
        _pairs(out, "metadata", self.metadata)
        if self.unread:
            _pairs(out, "settings that llorch does not read", self.unread)
        _print_quantisation(out, self.quantisation)
        sample = f"sampled {self.sampled} tensors by their last rows" if self.sampled else "not sampled"
        out.print(f"\nweights: {sample}; llorch run and llorch verify read them all")
        rows = table("tensors", "type", "shape", ">offset", ">bytes")
        for tensor in self.tensors:
            shape = " x ".join(map(str, tensor["shape"]))
            rows.add_row(tensor["name"], tensor["type"], shape, f"{tensor['offset']:,}", f"{tensor['n_bytes']:,}")
        out.print()
        print_table(out, rows)


def read_contents(path: Path) -> Contents:
    """Read a GGUF file or a Hugging Face folder; reasons to refuse the model go to `problems`."""
    problems: list[str] = []
    if path.is_dir():
        kind, metadata = "Hugging Face folder", {}
        tensors = _attempt(problems, lambda: _read_folder_tensors(path)) or []
        tokenizer = _attempt(problems, lambda: _read_folder_tokenizer(path))
        _attempt(problems, lambda: read_templates(path))
        quantisation = _attempt(problems, lambda: of_folder(path))
    else:
        with open_gguf(path) as file:
            kind = f"GGUF v{file.version}"
            metadata = {key: _metadata_value(value) for key, value in file.metadata.items()}
            tensors = _tensor_records(file, lambda tensor: tensor.ggml_type.name)
            tokenizer = _attempt(problems, lambda: Tokenizer.from_gguf(file) if has_vocabulary(file) else None)
            _attempt(problems, lambda: templates_of_metadata(file.metadata, path))
            quantisation = of_file(file)
    weights = _attempt(problems, lambda: open_table(path))
    sampled = 0 if weights is None else _attempt(problems, lambda: _sample(weights)) or 0
    return Contents(
        path=path, format=kind, config=None if weights is None else asdict(weights.config),
        tokenizer=_describe(tokenizer) if tokenizer is not None else None, metadata=metadata,
        quantisation=quantisation, tensors=tensors, sampled=sampled,
        unread=_attempt(problems, lambda: _plain_values(unread_settings(path))) or {},
        notes=[] if weights is None else weights.notes_on_left_out("not used"), problems=problems,
    )  # fmt: skip


def _attempt(problems: list[str], read: Callable[[], Result]) -> Result | None:
    """Call `read`, or note its error in `problems`."""
    try:
        return read()
    except FormatError as error:
        if str(error) not in problems:
            problems.append(str(error))
        return None


def _sample(weights: Weights) -> int:
    """Search the last row of each tensor for zeros, which an interrupted download leaves; return the number of tensors.

    Matrices of quantised folders are left out: they have no rows of bytes.
    """
    weights.require_written()
    names = [name for name in weights if isinstance(weights.stored_type(name), GGMLType)]
    for name in names:
        weights.search_zeros(name)
    return sum(len(weights.slots[name].tensors) for name in names)


def _read_folder_tensors(path: Path) -> list[dict]:
    with SafetensorsFolder(path) as folder:
        return _tensor_records(folder, lambda tensor: tensor.dtype)


def _read_folder_tokenizer(path: Path) -> Tokenizer | None:
    """Read the tokenizer; a model without one accepts token ids only."""
    return Tokenizer.from_huggingface(path) if (path / "tokenizer.json").exists() else None


def _tensor_records(source: GGUFFile | SafetensorsFolder, read_type: Callable) -> list[dict]:
    return [
        {"name": name, "type": read_type(t), "shape": list(t.shape), "offset": t.offset, "n_bytes": t.n_bytes}
        for name, t in source.tensors.items()
    ]


def _describe(tokenizer: Tokenizer) -> dict:
    return {
        "vocab_size": tokenizer.vocab_size, "bos_token_id": tokenizer.bos_token_id,
        "eos_token_ids": sorted(tokenizer.eos_token_ids), "sample_text": SAMPLE,
        "sample_ids": tokenizer.encode(SAMPLE),
    }  # fmt: skip


def _shortened(value: object) -> object:
    """Shorten a value for display: a float becomes the shortest decimal that is equal in float32, the file's type."""
    if isinstance(value, tuple):
        return tuple(map(_shortened, value))
    return shortest(value) if isinstance(value, float) else value


def _plain_values(values: Mapping[str, object]) -> dict[str, object]:
    return {key: value if isinstance(value, list) else _metadata_value(value) for key, value in values.items()}


def _metadata_value(value: object) -> object:
    """Return a metadata value; an array becomes the type and the number of its elements."""
    if isinstance(value, np.ndarray):
        return f"{len(value)} x {value.dtype}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{len(value)} x text"
    return value


def _by_row(config: Mapping[str, Any]) -> dict[str, object]:
    """Lay out a configuration as a table: nested fields get joined names, and equal layers share a row."""
    rows: dict[str, object] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            rows |= {f"{name}.{inner_name}": inner_value for inner_name, inner_value in value.items()}
        elif name == "layers":
            rows |= _layers_by_kind([_describe_layer(layer) for layer in value] or ["attention"] * config["n_layers"])
        else:
            rows[name] = value or config["head_dim"] if name == "rotary_dim" else value
    return rows


def _layers_by_kind(kinds: list[str]) -> dict[str, str]:
    """Return one entry for each kind of layer: a label with the layers' numbers, and the description of the kind."""
    layers_by_kind: dict[str, list[str]] = {}
    for layer, kind in enumerate(kinds):
        layers_by_kind.setdefault(kind, []).append(str(layer))
    if len(layers_by_kind) == 1:
        return {"layers": f"all: {kinds[0]}"}
    return {f"layers {_cut_text(','.join(numbers))}": kind for kind, numbers in layers_by_kind.items()}


def _describe_layer(layer: Mapping[str, Any]) -> str:
    words = {"experts": layer["experts"], "no RoPE": not layer["rope"], "norms of heads": layer["head_norm"]}
    words |= {"temperature": layer["has_attention_temperature"]}
    words |= {f"{name} of {layer[name]}": layer[name] for name in ("window", "chunk")}
    return ", ".join([layer["mixer"], *(word for word, is_shown in words.items() if is_shown)])


def _cut_text(text: str) -> str:
    return text[:SHOWN] + (" ..." if len(text) > SHOWN else "")


def _print_quantisation(out: Console, quantisation: Quantisation | None) -> None:
    if quantisation is None:
        return
    rows = table("quantisation", ">matrices", ">numbers", ">bytes", ">bits per weight")
    for group in quantisation.types:
        bits = f"{group.bits_per_weight:.2f}"
        rows.add_row(group.type, str(group.n_matrices), f"{group.n_numbers:,}", f"{group.n_bytes:,}", bits)
    out.print()
    print_table(out, rows)
    for key, text in rows_of(quantisation).items():
        out.print(f"{key}: {repr(text)[1:-1]}")


def _pairs(out: Console, title: str, values: Mapping[str, object] | None) -> None:
    """Print a mapping as a table of keys and shortened values; "none" if it is empty."""
    if not values:
        out.print(f"\n{title}: none")
        return
    rows = table(title, "")
    for key, value in values.items():
        text = str(_shortened(value))
        rows.add_row(key, repr(text[:SHOWN])[1:-1] + (" ..." if len(text) > SHOWN else ""))
    out.print()
    print_table(out, rows)
