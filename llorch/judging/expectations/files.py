"""Checkpoint 00: a file as our readers see it, tensors and tokens, against readers that someone else wrote.

The other side is the `gguf` package's GGUFReader for a GGUF file (name, type, shape and hash of the bytes) and the
`safetensors` package for a Hugging Face folder (name, type and shape; transformers then loads the values itself).
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

_LIBRARIES = "llorch.engines.dequantisers"

Table = Mapping[str, str]  # tensor name -> "dtype shape [sha256]"
Encode = Callable[[str], list[int]]  # with the special tokens that the file asks for


def foundation_rows(model: str, own: Table, foreign: Table, *, backend: str = "numpy") -> Iterator[Comparison]:
    """Checkpoint 00: names, types, shapes and bytes of all tensors."""
    wrong = differing(own, foreign)
    share, note = len(wrong) / len(own.keys() | foreign.keys()), format_wrong_tensors(wrong, own, foreign)
    yield compare_exact(StageRef("00", "tensors"), "reader", share, note, model=model, backend=backend)


def token_rows(
    model: str, encode: Encode, checks: Sequence[TokenCheck], *, backend: str = "numpy"
) -> Iterator[Comparison]:
    """Compare llorch's token ids with each engine's, for every text of checkpoint 00."""
    for engine in sorted({engine for check in checks for engine in check.ids}):
        texts = [check for check in checks if engine in check.ids]
        wrong = [check for check in texts if encode(check.text) != list(check.ids[engine])]
        note = f"{wrong[0].text!r}: {encode(wrong[0].text)} not {wrong[0].ids[engine]}" if wrong else ""
        share = len(wrong) / len(texts)
        yield compare_exact(StageRef("00", "token_ids"), engine, share, note, model=model, backend=backend)


def decode_rows(model: str, weights: Weights) -> Iterator[Comparison]:
    """Checkpoint 13: our decoding of every matrix of a file, bit by bit against ggml's own C functions."""
    theirs = partial(in_child, "llamacpp", weights.path, "llorch.engines.ggml_tensor:decoded_hash")
    by_type: dict[str, list[Packed]] = defaultdict(list)
    for info in weights.source.tensors.values():
        packed = weights.source.packed(info.name)
        if packed.ggml_type is not GGMLType.F32:
            by_type[packed.ggml_type.name].append(packed)
    with ThreadPoolExecutor(1) as beside:
        for kind, tensors in by_type.items():
            wrong = [packed.name for packed in tensors if not _decodes_alike(packed, partial(beside.submit, theirs))]
            share, note = len(wrong) / len(tensors), ", ".join(wrong[:5])
            yield compare_exact(StageRef("13", "decode", part=kind), "llamacpp", share, note, model=model)


def _decodes_alike(packed: Packed, ask: Callable[..., Future[str]]) -> bool:
    """Tell if `ask`, which hashes the values of another decoder, agrees with llorch in every tile."""
    for start, ours in packed.tiles():
        answer = ask(packed.by_row[start : start + len(ours)], packed.ggml_type, ours.size)
        if hashlib.sha256(ours.data).hexdigest() != answer.result():
            return False
    return True


def matrix_rows(model: str, folder: QuantisedFolder) -> Iterator[Comparison]:
    """Checkpoint 13: our decoding of a quantised folder, bit by bit against the library of its method."""
    theirs, where = partial(in_child, "transformers", folder.path), str(folder.path.absolute())
    if (package := theirs(f"{_LIBRARIES}:missing", where)) is not None:
        logger.info("%s: %s is not installed", folder.path, package or f"no library for {folder.method}")
        return
    by_kind: dict[str, list[str]] = defaultdict(list)
    library = theirs(f"{_LIBRARIES}:package", where)
    for name, found in folder.matrices.items():
        by_kind[found.scheme.name].append(name)
    for kind, names in by_kind.items():
        wrong = {
            name: share
            for name in names
            if (share := _share_of_others(folder, name, theirs(f"{_LIBRARIES}:dequantised", where, name)))
        }
        note = ", ".join(f"{name}: {share:.2%}" for name, share in [*wrong.items()][:5])
        note = note or f"{len(names)} matrices, number by number as {library} decodes them"
        share = len(wrong) / len(names)
        yield compare_exact(StageRef("13", "decode", part=kind), folder.method, share, note, model=model)


def undecoded(weights: Weights) -> dict[str, str]:
    """Name the missing library that would decode a quantised folder too, and explain the effect."""
    if not isinstance(folder := weights.source, QuantisedFolder):
        return {}
    package = in_child("transformers", folder.path, f"{_LIBRARIES}:missing", str(folder.path.absolute()))
    if package is None:
        return {}
    said = "only llorch decodes these weights; goldens of small folders judge its readers"
    return {package or folder.method: f"{said}{f'; pip install {package} for more' if package else ''}"}


def _share_of_others(folder: QuantisedFolder, name: str, theirs: np.ndarray | None) -> float:
    """Compute the share of elements with other numbers; 1 if the library does not read such a matrix."""
    ours = folder.array(name)
    if theirs is None or theirs.shape != ours.shape:
        return 1.0
    return float((ours != theirs).mean())


def own_tensors(source: GGUFFile | SafetensorsFolder) -> Table:
    """Build the tensor table by llorch's reader, in the names and shapes of the file."""
    if isinstance(source, GGUFFile):
        tensors = source.tensors.items()
        return {name: _entry(info.ggml_type.name, info.shape, source.raw(name)) for name, info in tensors}
    return {name: _entry(info.dtype, info.shape) for name, info in source.stored.items()}


def fingerprint(path: Path) -> str:
    """Hash of the names, types, shapes and bytes of all tensors of a GGUF file; the rest of the file is free."""
    weights = open_weights(path)
    with closing(weights.source):
        table = sorted(own_tensors(weights.source).items())
    return hashlib.sha256(repr(table).encode()).hexdigest()


def foreign_tensors(path: Path) -> Table:
    """Build the tensor table by a reader that is not llorch's: the gguf package; safetensors, without digests."""
    if not path.is_dir():
        from gguf import GGUFReader

        tensors = GGUFReader(path).tensors
        return {t.name: _entry(t.tensor_type.name, tuple(t.shape[::-1].tolist()), t.data) for t in tensors}
    from safetensors import safe_open

    table: dict[str, str] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():
                part = opened.get_slice(name)
                table[name] = _entry(part.get_dtype(), tuple(part.get_shape()))
    return table


def differing(own: Table, foreign: Table) -> list[str]:
    """Name the tensors that are missing on one side or differ between both."""
    return sorted(name for name in own.keys() | foreign.keys() if own.get(name) != foreign.get(name))


def format_wrong_tensors(wrong: Sequence[str], own: Table, foreign: Table) -> str:
    """Format the names of the first five wrong tensors, and the error of the first; empty if none is wrong."""
    if not wrong:
        return ""
    first, *others = wrong[:5]
    actual, wanted = (table.get(first, "nothing").split()[:2] for table in (own, foreign))
    what = "other bytes" if actual == wanted else f"{' '.join(actual)}, not {' '.join(wanted)}"
    return ", ".join([f"{first} ({what})", *others])


def _entry(dtype: str, shape: tuple[int, ...], data: np.ndarray | None = None) -> str:
    table_entry = f"{dtype} {'x'.join(map(str, shape))}"
    if data is None:
        return table_entry
    return f"{table_entry} {hashlib.sha256(np.ascontiguousarray(data).data).hexdigest()}"
