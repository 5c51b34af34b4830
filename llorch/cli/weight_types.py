"""The number types of the matrices of a file: how each is quantised, and which matrices are floats."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path

from llorch.files import GGUFFile
from llorch.files.packed import StoredType, has_codes
from llorch.files.quantised import QuantisedFolder, is_quantised
from llorch.files.quantised.activations import codes_of_engine
from llorch.files.strict_json import read_settings
from llorch.runtime.errors import FormatError


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
    """The number types of the matrices of a file, and the roundings that its settings ask for."""

    method: str
    types: list[MatrixType]  # the largest first
    bits_per_weight: float  # of all matrices together
    not_quantised: list[str]  # modules whose matrices are floats
    not_quantised_in_short: list[str]  # the same, with the numbers of layers and experts as ranges
    activations: list[str]  # roundings of the inputs of matrices
    kv_cache: list[str]  # roundings of keys and values
    not_read: str | None  # why llorch cannot compute the roundings


Numbers = tuple[int, ...]
Matrix = tuple[str, StoredType, tuple[int, ...], int]  # name, type, shape, bytes


def of_file(file: GGUFFile) -> Quantisation | None:
    """Summarise the types of a GGUF file; None if every matrix is floats."""
    matrices = [(name, one.ggml_type, one.shape, one.n_bytes) for name, one in file.tensors.items()]
    return _summarised("ggml", matrices)


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
            (name, folder.packed(name).ggml_type, one.shape, one.n_bytes)
            for name, one in folder.tensors.items()
            if one.holds_floats  # `open_weights` names a tensor of integers that belongs to no matrix
        ]
        activations, caches, not_read = [], [], None
        try:
            activations = _counted(map(str, folder.activations.inputs.values()))
            caches = _counted(str(one) for pair in folder.activations.caches.values() for one in pair)
        except FormatError as error:
            not_read = str(error)
            codes = codes_of_engine(folder.method, folder.source.settings)
            activations = [] if codes is None else [codes]
        return _summarised(folder.method, matrices, activations, caches, not_read)


def rows_of(made: Quantisation) -> Mapping[str, str]:
    """Give the lines of the table that follow those of the types."""
    rows = {"method": made.method, "bits per weight, all matrices": f"{made.bits_per_weight:.2f}"}
    rows["not quantised"] = ", ".join(made.not_quantised_in_short) or "none"
    if made.not_read is not None and made.activations:
        codes = ", ".join(made.activations)
        return rows | {"activations": f"the engine rounds them to {codes}; llorch does not reproduce this rounding"}
    if made.not_read is not None:
        return rows | {"activations, KV cache": f"unknown: {made.not_read}"}
    return rows | {
        "activations": ", ".join(made.activations) or "not quantised",
        "KV cache": ", ".join(made.kv_cache) or "not quantised",
    }


def _summarised(
    method: str,
    tensors: Iterable[Matrix],
    activations: list[str] | None = None,
    caches: list[str] | None = None,
    not_read: str | None = None,
) -> Quantisation | None:
    """Summarise the types of quantised matrices; None if no matrix is quantised."""
    matrices = [one for one in tensors if len(one[2]) > 1]
    if not any(has_codes(kind) for _, kind, _, _ in matrices):
        return None
    kinds: dict[StoredType, list[Matrix]] = {}
    for one in matrices:
        kinds.setdefault(one[1], []).append(one)
    types = [MatrixType(kind.name, len(some), *_sizes(some)) for kind, some in kinds.items()]
    floats = [name.removesuffix(".weight") for name, kind, _, _ in matrices if not has_codes(kind)]
    return Quantisation(
        method=method,
        types=sorted(types, key=lambda one: -one.n_numbers),
        bits_per_weight=_sizes(matrices)[2],
        not_quantised=floats,
        not_quantised_in_short=in_short(floats, [name.removesuffix(".weight") for name, *_ in matrices]),
        activations=activations or [],
        kv_cache=caches or [],
        not_read=not_read,
    )


def _sizes(matrices: list[Matrix]) -> tuple[int, int, float]:
    """Count numbers and bytes, and the bits of one number."""
    n_numbers, n_bytes = sum(prod(one[2]) for one in matrices), sum(one[3] for one in matrices)
    return n_numbers, n_bytes, round(8 * n_bytes / max(1, n_numbers), 3)


def _counted(texts: Iterable[str]) -> list[str]:
    """List each text once, with the number of its occurrences."""
    return [_with_count(text, count) for text, count in Counter(texts).items()]


def _with_count(text: str, count: int) -> str:
    """Append the number of occurrences to a text, unless it occurs once."""
    return text if count == 1 else f"{text} ({count} times)"


def in_short(meant: list[str], known: list[str]) -> list[str]:
    """List modules once for all layers and experts: a star for all that have the module, else ranges of numbers."""
    groups: dict[str, set[Numbers]] = {}
    for name in meant:
        groups.setdefault(_pattern_of(name), set()).add(_numbers_of(name))
    others = {pattern: set[Numbers]() for pattern in groups}
    for name in known:
        if (pattern := _pattern_of(name)) in groups:
            others[pattern].add(_numbers_of(name))
    made = []
    for pattern, numbers in groups.items():
        for slots, count in _slots(numbers, others[pattern]):
            text = pattern.format(*slots)
            made.append(_with_count(text, count) if "*" in slots else text)
    return made


def _slots(meant: set[Numbers], known: set[Numbers]) -> Iterator[tuple[list[str], int]]:
    """Yield texts in place of the numbers of names, and how many names they stand for."""
    columns = [set(column) for column in zip(*meant, strict=True)]
    if prod(map(len, columns)) == len(meant):
        alone = [set(column) for column in zip(*known, strict=True)]
        yield ["*" if one == whole else _ranges(one) for one, whole in zip(columns, alone, strict=True)], len(meant)
        return
    for first in sorted(columns[0]):
        below, around = ({one for one in some if one[0] == first} for some in (meant, known))
        for slots, count in _slots({one[1:] for one in below}, {one[1:] for one in around}):
            yield [str(first), *slots], count


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


def _pattern_of(name: str) -> str:
    """Replace the number of a layer or an expert by a field of `str.format`."""
    escaped = name.replace("{", "{{").replace("}", "}}")
    return ".".join("{}" if part.isdecimal() else part for part in escaped.split("."))


def _numbers_of(name: str) -> Numbers:
    """Return the numbers of the layer and the expert in a name."""
    return tuple(int(part) for part in name.split(".") if part.isdecimal())
