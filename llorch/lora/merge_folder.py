"""A merged Hugging Face folder from a Hugging Face folder: new tensors, every other file byte for byte."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from llorch.files.export_huggingface import DTYPES, huggingface_size, write_json, write_safetensors
from llorch.files.new_file import new_folder
from llorch.files.quant import GGMLType
from llorch.lora.merge import MergedWeights
from llorch.write_checks import CONFIG, counting, files_beside, placing, read_back


def write_merged_folder(
    merged: MergedWeights, target: Path, *, ggml_type: GGMLType, report: Callable[[str], None]
) -> list[str]:
    """Write a folder that transformers loads, complete or absent; returns what was changed beside the tensors.

    FormatError: NonFinite, OutOfRange for a number that the dtype cannot hold, Unsafe for a file that links out of the
    source.
    """
    source, notes = Path(merged.path), []
    kept = files_beside(source)  # refuses before tensors are written
    with placing(target, huggingface_size(merged.config, ggml_type)), new_folder(target) as folder:
        write_safetensors(merged, folder, ggml_type=ggml_type, on_tensor=counting(merged, report))
        for file in kept:
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
        changes = _changes(merged, source, ggml_type)
        if changes:
            values = json.loads((source / CONFIG).read_bytes())
            write_json(folder / CONFIG, values | changes)
            notes = [f"{CONFIG}: {key} is {json.dumps(value)} now" for key, value in changes.items()]
        read_back(folder, merged, target)
    return notes


def _changes(merged: MergedWeights, source: Path, ggml_type: GGMLType) -> dict[str, object]:
    """What the configuration would say wrongly of the merged tensors."""
    values = json.loads((source / CONFIG).read_bytes())
    changes: dict[str, object] = {}
    if values.get("tie_word_embeddings", False) != merged.config.tie_word_embeddings:
        changes["tie_word_embeddings"] = merged.config.tie_word_embeddings
    stored = {merged.stored_type(name) for name in merged}
    if stored != {ggml_type}:
        changes |= {key: DTYPES[ggml_type] for key in ("dtype", "torch_dtype") if key in values}
    return changes
