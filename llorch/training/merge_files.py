"""Merge a base and an adapter on disk into a model on disk, and measure how rounding changes the adapter's effect."""

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
from llorch.files.output_paths import CONFIG, check_target, size_of, without_quantisation
from llorch.files.quant import GGMLType, decode, encode
from llorch.files.tensor_names import count_parameters
from llorch.files.tokenizer.conversation import GENERATION, chat_ends, unnamed_ends, with_ends
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import Adapter
from llorch.lora.base import matrix_types, quantised_types
from llorch.lora.files import adapter_for, check_merge
from llorch.lora.merge import MergedWeights, parts_of
from llorch.model.blocks import forward
from llorch.model.cache import KVCache

LARGEST_COMPARED = 600_000_000  # weights; logits of larger models are compared only on request, to save time
N_IDS = 12  # token ids for the comparison of logits


@dataclass(frozen=True, kw_only=True)
class MatrixChange:
    """Change of one merged matrix."""

    change: float  # largest |W' - W| of the written numbers
    rounding: float  # largest distance of the written numbers from the exact sum
    vanished: float  # share of the elements that the adapter changes but rounding to the stored type restores


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Comparison of logits for a few tokens spread over the vocabulary."""

    spread: float  # standard deviation of the logits with the adapter
    effect: float  # largest difference between the base and the base with the adapter
    error: float  # largest difference between the base with the adapter and the merged model


@dataclass(frozen=True)
class Merge:
    """Report of a merge."""

    base: Path
    adapter: Path
    target: Path
    ggml_type: GGMLType
    base_types: list[str]  # stored types of the base's matrices
    n_bytes: int
    changes: dict[str, MatrixChange]  # by canonical name
    logits: Agreement | None  # None if not compared
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
    """Write a base with an adapter merged in: as GGUF if the target ends in .gguf, else as a folder.

    Type None keeps a float type of the base, and uses F32 for a quantised base. `logits` None compares logits up to
    `LARGEST_COMPARED` weights. Raises FormatError BaseMismatch, also if the adapter was trained on a quantised copy of
    the base (unless `any_base`), FileExistsError for an existing target (unless `force`), UserError for a target that
    is a source, or for a type that its format lacks. After an error the target does not exist.
    """
    base, adapter, target = Path(base), Path(adapter), Path(target)
    check_target(adapter, base, target=target, force=force)
    with closing((weights := open_weights(base)).source):
        loaded, verdict = adapter_for(weights, adapter, any_base=any_base)
        merged, notes = MergedWeights(weights, loaded), [verdict, *check_merge(adapter, weights, any_base=any_base)]
        kind = _choose_type(merged, target, ggml_type, notes)
        notes += _write_merged(merged, target, kind, report)
        report("checking the written file")
        changes, agreement = _compare_written(weights, merged, target, logits)
        base_types = [*matrix_types(weights)]
        return Merge(base, adapter, target, kind, base_types, size_of(target), changes, agreement, notes)


def _choose_type(merged: MergedWeights, target: Path, requested: GGMLType | None, notes: list[str]) -> GGMLType:
    """Choose the type of the merged matrices; for a quantised base, F32 by default, with a note."""
    if quantised := quantised_types(matrix_types(merged)):
        source = "the decoded numbers of a quantised base"
        notes.append(f"merged into {source} ({', '.join(quantised)}), not into the original weights")
        requested = requested or GGMLType.F32
    return choose_type(merged, requested, to_gguf=target.suffix == ".gguf")


def _write_merged(merged: MergedWeights, target: Path, kind: GGMLType, report: Callable[[str], None]) -> list[str]:
    """Write a folder or a GGUF file; return the notes of the writer."""
    source = Path(merged.path)
    if not source.is_dir() or target.suffix == ".gguf":
        return write_model(merged, target, ggml_type=kind, report=report).notes
    with new_model_folder(merged, target, kind, report, source=source) as folder:
        notes = _write_settings(merged, folder, source, kind)
    return [*notes, *merged.notes_on_left_out("not written")]


def _write_settings(merged: MergedWeights, folder: Path, source: Path, ggml_type: GGMLType) -> list[str]:
    """Write config.json and generation_config.json if the merge changes entries or EOS tokens; return notes."""
    notes, source_settings = list[str](), json.loads((source / CONFIG).read_bytes())
    values, changes = without_quantisation(source_settings), _changed_settings(merged, source_settings, ggml_type)
    if changes or values != source_settings:
        write_json(folder / CONFIG, values | changes)
        notes = [f"{CONFIG}: {key} is {json.dumps(value)} now" for key, value in changes.items()]
    if missing_ends := unnamed_ends(chat_ends(source), source):
        values = with_ends(source, missing_ends)
        write_json(folder / GENERATION, values)
        reason = "so that generate of transformers stops where the chat template ends a turn"
        notes.append(f"{GENERATION}: eos_token_id is {json.dumps(values['eos_token_id'])} now, {reason}")
    return notes


def _changed_settings(merged: MergedWeights, values: Mapping[str, object], ggml_type: GGMLType) -> dict[str, object]:
    """Return new values for the entries of config.json that do not fit the merged tensors."""
    changes: dict[str, object] = {}
    if values.get("tie_word_embeddings", False) != merged.config.tie_word_embeddings:
        changes["tie_word_embeddings"] = merged.config.tie_word_embeddings
    stored_types = {merged.stored_type(name) for name in merged}
    if stored_types != {ggml_type}:
        changes |= {key: DTYPES[ggml_type] for key in ("dtype", "torch_dtype") if key in values}
    return changes


def _compare_written(
    weights: Weights, merged: MergedWeights, target: Path, logits: bool | None
) -> tuple[dict[str, MatrixChange], Agreement | None]:
    """Read the written model and compare each merged matrix, and the logits if requested."""
    compares_logits = count_parameters(weights.config) <= LARGEST_COMPARED if logits is None else logits
    with closing((written_weights := open_weights(target)).source):
        changes = {name: _measure_change(weights, merged, written_weights, name) for name in parts_of(merged.adapter)}
        return changes, compare_logits(weights, merged.adapter, written_weights) if compares_logits else None


def _measure_change(weights: Weights, merged: MergedWeights, written: Weights, name: str) -> MatrixChange:
    """Compare the written matrix with the base, rounded to the same type, and with the sum before that rounding."""
    base = weights.read(name if name in weights else "embed_tokens")
    exact, final = merged.read(name), written.read(name)
    kind = written.as_stored(name).ggml  # matrices that do not fit a type's blocks have another type
    parts = [*encode(base, kind, name=name, path=weights.path)]
    rounded = decode(np.concatenate(parts), kind, base.shape)
    changed = exact != base
    vanished = np.count_nonzero(changed & (final == rounded)) / max(1, np.count_nonzero(changed))
    return MatrixChange(
        change=float(np.abs(final - base).max()), rounding=float(np.abs(final - exact).max()), vanished=float(vanished)
    )


def compare_logits(weights: Weights, adapter: Adapter, merged: Weights) -> Agreement:
    """Compare the logits of base, base with adapter and merged model on the same tokens."""
    ids = probe_ids(weights.config.vocab_size, adapter)
    base_logits, adapter_logits, merged_logits = (
        logits_by(w, ids) for w in (weights, AdaptedWeights(weights, adapter), merged)
    )
    effect, error = (float(np.abs(logits - adapter_logits).max()) for logits in (base_logits, merged_logits))
    return Agreement(spread=float(adapter_logits.std()), effect=effect, error=error)


def probe_ids(vocab_size: int, adapter: Adapter) -> Int64[np.ndarray, " ids"]:
    """Spread `N_IDS` token ids over the vocabulary, in an irregular order.

    An adapter of the embedding changes only trained tokens, so half of the ids are those that it changes most.
    """
    order = np.arange(N_IDS) * 5 % N_IDS  # a permutation, because 5 and 12 have no common factor
    ids = (2 * order + 1) * vocab_size // (2 * N_IDS)
    if "embed_tokens" in adapter.tensors:
        changes = np.abs(adapter.tensors["embed_tokens"].lora_A).sum(axis=0)
        ids[::2] = np.argsort(-changes, kind="stable")[: N_IDS // 2]
    return ids


def logits_by(weights: Weights, ids: np.ndarray) -> np.ndarray:
    """Compute the logits of every token."""
    return forward(ids, weights, KVCache(weights.config, weights.dtype))
