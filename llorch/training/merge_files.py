"""A base and an adapter on disk to a merged model on disk, and what rounding did to the adapter on the way."""

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from llorch.files import Weights, open_weights
from llorch.files.convert import choose_type, new_model_folder, write_model
from llorch.files.export_huggingface import DTYPES, write_json
from llorch.files.output_paths import CONFIG, check_places, size_of, without_quantisation
from llorch.files.packed import StoredType, has_codes
from llorch.files.quant import GGMLType, decode, encode
from llorch.files.tensor_names import count_parameters
from llorch.files.tokenizer.conversation import GENERATION, chat_ends, unnamed_ends, with_ends
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import Adapter
from llorch.lora.files import adapter_for, check_merge
from llorch.lora.merge import MergedWeights, parts_of
from llorch.model.blocks import forward
from llorch.model.cache import KVCache

LARGEST_COMPARED = 600_000_000  # weights; beyond, logits are compared when asked for
N_IDS = 12  # that are compared


@dataclass(frozen=True, kw_only=True)
class MatrixChange:
    """What became of one merged matrix."""

    change: float  # largest |W' - W| of the written numbers
    rounding: float  # largest distance of the written numbers from the exact sum
    vanished: float  # share of the elements that the adapter moves and the stored type does not show


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Logits of a few tokens from all over the vocabulary."""

    spread: float  # standard deviation of the logits with the adapter
    effect: float  # largest difference between the base and the base with the adapter
    error: float  # largest difference between the base with the adapter and the merged model


@dataclass(frozen=True)
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
    moderate size. Refused: BaseMismatch, also if the adapter was trained on a quantised copy of the base (unless
    `any_base`), a target that exists (FileExistsError, unless `force`) or is a source (ValueError), a type its format
    lacks (ValueError). After an error nothing is left of the target.
    """
    base, adapter, target = Path(base), Path(adapter), Path(target)
    check_places(adapter, base, target=target, force=force)
    with closing((weights := open_weights(base)).source):
        read, verdict = adapter_for(weights, adapter, any_base=any_base)
        merged, notes = MergedWeights(weights, read), [verdict, *check_merge(adapter, weights, any_base=any_base)]
        kind = _type_for(merged, target, ggml_type, notes)
        notes += _write_merged(merged, target, kind, report)
        report("checking the written file")
        changes, agreement = _compare_written(weights, merged, target, logits)
        base_types = sorted(kind.name for kind in _types(weights))
        return Merge(base, adapter, target, kind, base_types, size_of(target), changes, agreement, notes)


def _type_for(merged: MergedWeights, target: Path, wanted: GGMLType | None, notes: list[str]) -> GGMLType:
    """Choose the type of the merged matrices; a quantised base gives F32 unless a type is wanted, and a note."""
    quantised = sorted({kind.name for kind in _types(merged) if has_codes(kind)})
    if quantised:
        what = "the decoded numbers of a quantised base"
        notes.append(f"merged into {what} ({', '.join(quantised)}), not into the original weights")
        wanted = wanted or GGMLType.F32
    return choose_type(merged, wanted, to_gguf=target.suffix == ".gguf")


def _write_merged(merged: MergedWeights, target: Path, kind: GGMLType, report: Callable[[str], None]) -> list[str]:
    """Write a folder or a GGUF file; return the notes of the writer."""
    source = Path(merged.path)
    if not source.is_dir() or target.suffix == ".gguf":
        return write_model(merged, target, ggml_type=kind, report=report).notes
    with new_model_folder(merged, target, kind, report, beside=source) as folder:
        notes = _write_settings(merged, folder, source, kind)
    return [*notes, *merged.notes_on_left_out("not written")]


def _write_settings(merged: MergedWeights, folder: Path, source: Path, ggml_type: GGMLType) -> list[str]:
    """Write what is not as in the source: entries of config.json, and end tokens; return notes of it."""
    notes, stated = list[str](), json.loads((source / CONFIG).read_bytes())
    values, changes = without_quantisation(stated), _changes(merged, stated, ggml_type)
    if changes or values != stated:
        write_json(folder / CONFIG, values | changes)
        notes = [f"{CONFIG}: {key} is {json.dumps(value)} now" for key, value in changes.items()]
    if more := unnamed_ends(chat_ends(source), source):
        values = with_ends(source, more)
        write_json(folder / GENERATION, values)
        reason = "so that generate of transformers stops where the chat template ends a turn"
        notes.append(f"{GENERATION}: eos_token_id is {json.dumps(values['eos_token_id'])} now, {reason}")
    return notes


def _changes(merged: MergedWeights, values: Mapping[str, object], ggml_type: GGMLType) -> dict[str, object]:
    """Return the entries of the configuration that would be wrong for the merged tensors, with their new values."""
    changes: dict[str, object] = {}
    if values.get("tie_word_embeddings", False) != merged.config.tie_word_embeddings:
        changes["tie_word_embeddings"] = merged.config.tie_word_embeddings
    stored = {merged.stored_type(name) for name in merged}
    if stored != {ggml_type}:
        changes |= {key: DTYPES[ggml_type] for key in ("dtype", "torch_dtype") if key in values}
    return changes


def _compare_written(
    weights: Weights, merged: MergedWeights, target: Path, logits: bool | None
) -> tuple[dict[str, MatrixChange], Agreement | None]:
    """Read the written model: what became of each merged matrix, and of the logits if they are wanted."""
    compared = count_parameters(weights.config) <= LARGEST_COMPARED if logits is None else logits
    with closing((written := open_weights(target)).source):
        changes = {name: _change(weights, merged, written, name) for name in parts_of(merged.adapter)}
        return changes, compare_logits(weights, merged.adapter, written) if compared else None


def _types(weights: Weights) -> set[StoredType]:
    return {weights.stored_type(name) for name in weights if len(weights.shape(name)) == 2}


def _change(weights: Weights, merged: MergedWeights, written: Weights, name: str) -> MatrixChange:
    """Compare what was written with the base in the same type, and with the exact sum."""
    before = weights.read(name if name in weights else "embed_tokens")
    exact, after = merged.read(name), written.read(name)
    kind = written.as_stored(name).ggml  # some matrices do not fit the blocks of a type
    parts = [*encode(before, kind, name=name, path=weights.path)]
    rounded = decode(np.concatenate(parts), kind, before.shape)
    moved = exact != before
    unseen = np.count_nonzero(moved & (after == rounded)) / max(1, np.count_nonzero(moved))
    return MatrixChange(
        change=float(np.abs(after - before).max()), rounding=float(np.abs(after - exact).max()), vanished=float(unseen)
    )


def compare_logits(weights: Weights, adapter: Adapter, merged: Weights) -> Agreement:
    """Run three models on the same tokens."""
    ids = probe_ids(weights.config.vocab_size, adapter)
    plain, beside, inside = (logits_by(w, ids) for w in (weights, AdaptedWeights(weights, adapter), merged))
    effect, error = (float(np.abs(other - beside).max()) for other in (plain, inside))
    return Agreement(spread=float(beside.std()), effect=effect, error=error)


def probe_ids(vocab_size: int, adapter: Adapter) -> Int64[np.ndarray, " ids"]:
    """Spread ids over a vocabulary, in an order without a pattern.

    An adapter of the embedding moves only tokens that it was trained on: half of the ids are those it moves most.
    """
    places = np.arange(N_IDS) * 5 % N_IDS
    ids = (2 * places + 1) * vocab_size // (2 * N_IDS)
    if "embed_tokens" in adapter.tensors:
        moved = np.abs(adapter.tensors["embed_tokens"].lora_A).sum(axis=0)
        ids[::2] = np.argsort(-moved, kind="stable")[: N_IDS // 2]
    return ids


def logits_by(weights: Weights, ids: np.ndarray) -> np.ndarray:
    """Compute the logits of every token with some weights."""
    return forward(ids, weights, KVCache(weights.config, weights.dtype))
