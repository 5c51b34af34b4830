"""Where each model came from, kept beside the files as `provenance.json`."""

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path

from small_models.shapes import Recipe

_PACKAGES = ("torch", "transformers", "tokenizers", "gguf", "llama-cpp-python", "numpy")


def note(path: Path, recipe: Recipe, losses: list[float], *, difference: float) -> None:
    """Add or replace the entry of one model.

    Args:
        path: Its GGUF file; the note goes into the same folder.
        recipe: What it was made from.
        losses: Training loss of every step.
        difference: Relative distance between llama.cpp's logits and the trained model's.
    """
    file = path.with_name("provenance.json")
    entries = json.loads(file.read_text()) if file.exists() else {}
    tail = losses[-20:]
    entries[path.stem] = {
        "script": "reference_outputs/make_models.py",
        "recipe": dataclasses.asdict(recipe),
        "first_loss": round(losses[0], 4),
        "final_loss": round(sum(tail) / len(tail), 4),
        "llamacpp_relative_difference": float(f"{difference:.2g}"),
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "machine": platform.machine(),
    }
    file.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n")
