"""A base and an adapter on disk to a merged model on disk, and what rounding did to the adapter on the way."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llorch.convert import choose_type, write_model
from llorch.files import Weights, open_weights
from llorch.files.encode import encode
from llorch.files.names import inventory
from llorch.files.quant import BLOCK_SIZES, GGMLType, decode
from llorch.lora.files import check_base, read_adapter
from llorch.lora.logits import Agreement, compare_logits
from llorch.lora.merge import MergedWeights
from llorch.lora.merge_folder import write_merged_folder
from llorch.write_checks import check_places, size_of

LARGEST_COMPARED = 600_000_000  # weights; beyond, logits are compared when asked for


@dataclass(frozen=True, kw_only=True)
class MatrixChange:
    """What became of one merged matrix."""

    change: float  # largest |W' - W| of the written numbers
    rounding: float  # largest distance of the written numbers from the exact sum
    vanished: float  # share of the elements that the adapter moves and the stored type does not show


@dataclass(frozen=True, kw_only=True)
class Merge:
    """What was done."""

    base: Path
    adapter: Path
    target: Path
    ggml_type: GGMLType
    base_types: list[str]  # in which the base stores its matrices
    n_bytes: int
    changes: dict[str, MatrixChange]  # by canonical name
    logits: Agreement | None  # None: not compared
    notes: list[str]


def merge(
    base: str | Path,
    adapter: str | Path,
    target: str | Path,
    *,
    ggml_type: GGMLType | None = None,
    force: bool = False,
    any_base: bool = False,
    logits: bool | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Merge:
    """Write a base with an adapter merged in: as GGUF where the target ends in .gguf, else as folder.

    Type None keeps a float type of the base and takes F32 for a quantised one; `logits` None compares models of
    moderate size. Refused: BaseMismatch (unless `any_base`), a target that exists (FileExistsError, unless `force`) or
    is a source (ValueError), a type its format lacks (ValueError). After an error nothing is left of the target.
    """
    base, adapter, target = Path(base), Path(adapter), Path(target)
    for source in (adapter, base):
        check_places(source, target, force=force)
    with closing((weights := open_weights(base)).source):
        notes = [check_base(adapter, weights, any_base=any_base)]
        read = read_adapter(adapter, weights.config)
        merged = MergedWeights(weights, read)
        kind = _type_for(merged, target, ggml_type, notes)
        notes += _write(merged, target, kind, report)
        with closing((written := open_weights(target)).source):
            report("looking at the result")
            changes = {name: _change(weights, merged, written, name) for name in read.targets}
            n_weights = sum(int(np.prod(weight.shape)) for weight in inventory(weights.config).values())
            wanted = n_weights <= LARGEST_COMPARED if logits is None else logits
            agreement = compare_logits(weights, read, written) if wanted else None
        return Merge(
            base=base,
            adapter=adapter,
            target=target,
            ggml_type=kind,
            base_types=_types(weights),
            n_bytes=size_of(target),
            changes=changes,
            logits=agreement,
            notes=notes,
        )


def _type_for(merged: MergedWeights, target: Path, wanted: GGMLType | None, notes: list[str]) -> GGMLType:
    quantised = [name for name in _types(merged) if BLOCK_SIZES[GGMLType[name]][0] > 1]
    if quantised:
        what = "the decoded numbers of a quantised base"
        notes.append(f"merged into {what} ({', '.join(quantised)}); not into the weights that it was made from")
        wanted = wanted or GGMLType.F32
    return choose_type(merged, wanted, to_gguf=target.suffix == ".gguf")


def _write(merged: MergedWeights, target: Path, kind: GGMLType, report: Callable[[str], None]) -> list[str]:
    if Path(merged.path).is_dir() and target.suffix != ".gguf":
        return write_merged_folder(merged, target, ggml_type=kind, report=report)
    return write_model(merged, target, ggml_type=kind, report=report).notes


def _types(weights: Weights) -> list[str]:
    return sorted({weights.stored_type(name).name for name in weights if len(weights.shape(name)) == 2})


def _change(weights: Weights, merged: MergedWeights, written: Weights, name: str) -> MatrixChange:
    """Compare what was written with the base in the same type, and with the exact sum."""
    before = weights.read(name if name in weights else "embed_tokens")
    exact, after = merged.read(name), written.read(name)
    kind = written.stored_type(name)  # some matrices do not fit the blocks of a type
    parts = [*encode(before, kind, name=name, path=weights.path)]
    rounded = decode(np.concatenate(parts), kind, before.shape)
    moved = exact != before
    unseen = np.count_nonzero(moved & (after == rounded)) / max(1, np.count_nonzero(moved))
    return MatrixChange(
        change=float(np.abs(after - before).max()),
        rounding=float(np.abs(after - exact).max()),
        vanished=float(unseen),
    )
