"""Read what `llorch inspect` shows, with a sample of each tensor, also from a file that llorch cannot run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console

from llorch.cli.inputs import has_vocabulary
from llorch.cli.tables import console, print_table, table
from llorch.cli.weight_types import Quantisation, of_file, of_folder, rows_of
from llorch.files import GGUFFile, SafetensorsFolder, Weights, open_gguf
from llorch.files.opening import open_table, unread_settings
from llorch.files.quant import GGMLType
from llorch.files.tokenizer import Tokenizer
from llorch.files.tokenizer.chat_templates import read_templates, templates_of_metadata
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import shortest

SHOWN = 60  # characters of a long text; --json has all of it
SAMPLE = "Hello, world 27!"  # its ids tell vocabularies apart at a glance

Result = TypeVar("Result")


@dataclass(frozen=True)
class Contents:
    """A file, as far as it could be read; `plain` and `print` show it."""

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
    problems: list[str]  # why llorch would refuse to run it

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
    """Read a GGUF file or a Hugging Face folder; what llorch would refuse is in `problems`."""
    problems: list[str] = []
    if path.is_dir():
        kind, metadata = "Hugging Face folder", {}
        tensors = _attempt(problems, lambda: _tensors_of_folder(path)) or []
        tokenizer = _attempt(problems, lambda: _tokenizer_of_folder(path))
        _attempt(problems, lambda: read_templates(path))
        quantisation = _attempt(problems, lambda: of_folder(path))
    else:
        with open_gguf(path) as file:
            kind, metadata = (
                f"GGUF v{file.version}",
                {key: _metadata_value(value) for key, value in file.metadata.items()},
            )
            tensors = _tensor_records(file, lambda tensor: tensor.ggml_type.name)
            tokenizer = _attempt(problems, lambda: Tokenizer.from_gguf(file) if has_vocabulary(file) else None)
            _attempt(problems, lambda: templates_of_metadata(file.metadata, path))
            quantisation = of_file(file)
    weights = _attempt(problems, lambda: open_table(path))
    config = None if weights is None else weights.config
    sampled = 0 if weights is None else _attempt(problems, lambda: _sample(weights)) or 0
    return Contents(
        path=path,
        format=kind,
        config=asdict(config) if config is not None else None,
        tokenizer=_describe(tokenizer) if tokenizer is not None else None,
        metadata=metadata,
        quantisation=quantisation,
        tensors=tensors,
        sampled=sampled,
        unread=_attempt(problems, lambda: _plain_values(unread_settings(path))) or {},
        notes=[] if weights is None else weights.notes_on_left_out("not used"),
        problems=problems,
    )


def _attempt(problems: list[str], make: Callable[[], Result]) -> Result | None:
    """Make something, or note why it cannot be made."""
    try:
        return make()
    except FormatError as error:
        if str(error) not in problems:
            problems.append(str(error))
        return None


def _sample(weights: Weights) -> int:
    """Look for zeros at the ends of files and tensors; matrices of quantised folders have no rows of bytes."""
    weights.require_written()
    names = [name for name in weights if isinstance(weights.stored_type(name), GGMLType)]
    for name in names:
        weights.search_zeros(name)
    return sum(len(weights.slots[name].tensors) for name in names)


def _tensors_of_folder(path: Path) -> list[dict]:
    with SafetensorsFolder(path) as folder:
        return _tensor_records(folder, lambda tensor: tensor.dtype)


def _tokenizer_of_folder(path: Path) -> Tokenizer | None:
    """Read the tokenizer; none is no fault: such a model is given token ids."""
    return Tokenizer.from_huggingface(path) if (path / "tokenizer.json").exists() else None


def _tensor_records(source: GGUFFile | SafetensorsFolder, type_of: Callable) -> list[dict]:
    return [
        {"name": name, "type": type_of(t), "shape": list(t.shape), "offset": t.offset, "n_bytes": t.n_bytes}
        for name, t in source.tensors.items()
    ]


def _describe(tokenizer: Tokenizer) -> dict:
    return {
        "vocab_size": tokenizer.vocab_size,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_ids": sorted(tokenizer.eos_token_ids),
        "sample_text": SAMPLE,
        "sample_ids": tokenizer.encode(SAMPLE),
    }


def _shortened(value: object) -> object:
    """Return a value for people: a widened float32 as the shortest decimal that is equal in float32."""
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
    """Lay out a configuration as a table: fields of parts get names of their own, and equal layers are joined."""
    rows: dict[str, object] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            rows |= {f"{name}.{inner}": one for inner, one in value.items()}
        elif name == "layers":
            rows |= _layers_by_kind([_in_words(layer) for layer in value] or ["attention"] * config["n_layers"])
        else:
            rows[name] = value or config["head_dim"] if name == "rotary_dim" else value
    return rows


def _layers_by_kind(kinds: list[str]) -> dict[str, str]:
    """Return one entry for each kind of layer: a label with the layers' numbers, and the kind."""
    found: dict[str, list[str]] = {}
    for at, kind in enumerate(kinds):
        found.setdefault(kind, []).append(str(at))
    if len(found) == 1:
        return {"layers": f"all: {kinds[0]}"}
    return {f"layers {_cut_text(','.join(numbers))}": kind for kind, numbers in found.items()}


def _in_words(layer: Mapping[str, Any]) -> str:
    words = {"experts": layer["experts"], "no RoPE": not layer["rope"], "norms of heads": layer["head_norm"]}
    words |= {"temperature": layer["has_attention_temperature"]}
    words |= {f"{name} of {layer[name]}": layer[name] for name in ("window", "chunk")}
    return ", ".join([layer["mixer"], *(word for word, there in words.items() if there)])


def _cut_text(text: str) -> str:
    return text[:SHOWN] + (" ..." if len(text) > SHOWN else "")


def _print_quantisation(out: Console, made: Quantisation | None) -> None:
    if made is None:
        return
    rows = table("quantisation", ">matrices", ">numbers", ">bytes", ">bits per weight")
    for one in made.types:
        bits = f"{one.bits_per_weight:.2f}"
        rows.add_row(one.type, str(one.n_matrices), f"{one.n_numbers:,}", f"{one.n_bytes:,}", bits)
    out.print()
    print_table(out, rows)
    for key, text in rows_of(made).items():
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
