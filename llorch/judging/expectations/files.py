"""Tensors and tokens of a file as llorch reads them, against independent readers (validation points 00 and 13).

The independent reader is the `gguf` package for a GGUF file (name, type, shape and hash of the bytes), and the
`safetensors` package for a Hugging Face folder (name, type and shape; transformers loads the values itself).
"""

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from llorch.engines.process import in_child
from llorch.files import SafetensorsFolder, Weights, open_weights
from llorch.files.gguf import GGUFFile
from llorch.files.packed import Packed
from llorch.files.quant import GGMLType
from llorch.files.quantised import QuantisedFolder
from llorch.judging.compare import compare_exact
from llorch.judging.goldens.forward import TokenCheck
from llorch.judging.types import Comparison
from llorch.stages.stage_ref import StageRef

logger = logging.getLogger(__name__)

_LIBRARIES = "llorch.engines.dequantisers"  # runs in the child process of transformers

Table = Mapping[str, str]  # tensor name -> "dtype shape [sha256]"
Encode = Callable[[str], list[int]]  # text -> token ids, with the special tokens that the file asks for


def compare_tensors(model: str, actual: Table, expected: Table, *, backend: str = "numpy") -> Iterator[Comparison]:
    """Compare names, types, shapes and, for a GGUF file, bytes of all tensors."""
    wrong = differing(actual, expected)
    share, note = len(wrong) / len(actual.keys() | expected.keys()), format_wrong_tensors(wrong, actual, expected)
    yield compare_exact(StageRef("00", "tensors"), "reader", share, note, model=model, backend=backend)


def compare_tokens(
    model: str, encode: Encode, checks: Sequence[TokenCheck], *, backend: str = "numpy"
) -> Iterator[Comparison]:
    """Compare llorch's token ids with each engine's, for every text in `checks`."""
    for engine in sorted({engine for check in checks for engine in check.ids}):
        texts = [check for check in checks if engine in check.ids]
        wrong = [check for check in texts if encode(check.text) != list(check.ids[engine])]
        note = f"{wrong[0].text!r}: {encode(wrong[0].text)} not {wrong[0].ids[engine]}" if wrong else ""
        share = len(wrong) / len(texts)
        yield compare_exact(StageRef("00", "token_ids"), engine, share, note, model=model, backend=backend)


def decode_rows(model: str, weights: Weights) -> Iterator[Comparison]:
    """Compare llorch's decoding of every matrix of a GGUF file with ggml's C functions, bit by bit."""
    decode_hash = partial(in_child, "llamacpp", weights.path, "llorch.engines.ggml_tensor:decoded_hash")
    by_type: dict[str, list[Packed]] = defaultdict(list)
    for tensor in weights.source.tensors.values():
        packed = weights.source.packed(tensor.name)
        if packed.ggml_type is not GGMLType.F32:
            by_type[packed.ggml_type.name].append(packed)
    with ThreadPoolExecutor(1) as pool:
        for kind, tensors in by_type.items():
            wrong = [packed.name for packed in tensors if not _is_equal(packed, partial(pool.submit, decode_hash))]
            share, note = len(wrong) / len(tensors), ", ".join(wrong[:5])
            yield compare_exact(StageRef("13", "decode", part=kind), "llamacpp", share, note, model=model)


def _is_equal(packed: Packed, submit_hash: Callable[..., Future[str]]) -> bool:
    """Check if llorch's values equal ggml's in every tile (some rows); `submit_hash` hashes ggml's values."""
    for start, tile in packed.tiles():
        ggml_hash = submit_hash(packed.by_row[start : start + len(tile)], packed.ggml_type, tile.size)
        if hashlib.sha256(tile.data).hexdigest() != ggml_hash.result():
            return False
    return True


def compare_matrices(model: str, folder: QuantisedFolder) -> Iterator[Comparison]:
    """Compare llorch's decoding of a quantised folder with its method's library; if that is missing, yield nothing."""
    call_library, path = partial(in_child, "transformers", folder.path), str(folder.path.absolute())
    if (package := call_library(f"{_LIBRARIES}:missing", path)) is not None:
        logger.info("%s: %s is not installed", folder.path, package or f"no library for {folder.method}")
        return
    by_kind: dict[str, list[str]] = defaultdict(list)
    library = call_library(f"{_LIBRARIES}:package", path)
    for name, matrix in folder.matrices.items():
        by_kind[matrix.scheme.name].append(name)
    for kind, names in by_kind.items():
        wrong = {
            name: share
            for name in names
            if (share := _differing_share(folder, name, call_library(f"{_LIBRARIES}:dequantised", path, name)))
        }
        note = ", ".join(f"{name}: {share:.2%}" for name, share in [*wrong.items()][:5])
        note = note or f"{len(names)} matrices, number by number as {library} decodes them"
        share = len(wrong) / len(names)
        yield compare_exact(StageRef("13", "decode", part=kind), folder.method, share, note, model=model)


def missing_library(weights: Weights) -> dict[str, str]:
    """Return the missing library that would also decode a quantised folder, and the effect; empty if none is."""
    if not isinstance(folder := weights.source, QuantisedFolder):
        return {}
    package = in_child("transformers", folder.path, f"{_LIBRARIES}:missing", str(folder.path.absolute()))
    if package is None:
        return {}
    effect = "only llorch decodes these weights; goldens of small folders judge its readers"
    return {package or folder.method: f"{effect}{f'; pip install {package} for more' if package else ''}"}


def _differing_share(folder: QuantisedFolder, name: str, expected: np.ndarray | None) -> float:
    """Compute the share of elements that differ from the library's; 1 if the library cannot read the matrix."""
    actual = folder.array(name)
    if expected is None or expected.shape != actual.shape:
        return 1.0
    return float((actual != expected).mean())


def llorch_tensors(source: GGUFFile | SafetensorsFolder) -> Table:
    """Build the tensor table with llorch's reader, by the names and shapes of the file."""
    if isinstance(source, GGUFFile):
        tensors = source.tensors.items()
        return {name: _entry(tensor.ggml_type.name, tensor.shape, source.raw(name)) for name, tensor in tensors}
    return {name: _entry(tensor.dtype, tensor.shape) for name, tensor in source.stored.items()}


def fingerprint(path: Path) -> str:
    """Hash the names, types, shapes and bytes of all tensors of a GGUF file, without its metadata."""
    weights = open_weights(path)
    with closing(weights.source):
        table = sorted(llorch_tensors(weights.source).items())
    return hashlib.sha256(repr(table).encode()).hexdigest()


def library_tensors(path: Path) -> Table:
    """Build the tensor table with an independent reader: the gguf package, or safetensors (without hashes)."""
    if not path.is_dir():
        from gguf import GGUFReader

        tensors = GGUFReader(path).tensors
        return {t.name: _entry(t.tensor_type.name, tuple(t.shape[::-1].tolist()), t.data) for t in tensors}
    from safetensors import safe_open

    table: dict[str, str] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():
                tensor_slice = opened.get_slice(name)
                table[name] = _entry(tensor_slice.get_dtype(), tuple(tensor_slice.get_shape()))
    return table


def differing(actual: Table, expected: Table) -> list[str]:
    """List the tensors that differ between two tables, or that only one has."""
    return sorted(name for name in actual.keys() | expected.keys() if actual.get(name) != expected.get(name))


def format_wrong_tensors(wrong: Sequence[str], actual_table: Table, expected_table: Table) -> str:
    """Format the names of the first five `wrong` tensors, with the error of the first; empty if there are none."""
    if not wrong:
        return ""
    first, *next_names = wrong[:5]
    actual, expected = (table.get(first, "nothing").split()[:2] for table in (actual_table, expected_table))
    error = "other bytes" if actual == expected else f"{' '.join(actual)}, not {' '.join(expected)}"
    return ", ".join([f"{first} ({error})", *next_names])


def _entry(dtype: str, shape: tuple[int, ...], data: np.ndarray | None = None) -> str:
    table_entry = f"{dtype} {'x'.join(map(str, shape))}"
    if data is None:
        return table_entry
    return f"{table_entry} {hashlib.sha256(np.ascontiguousarray(data).data).hexdigest()}"
