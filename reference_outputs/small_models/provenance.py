"""Origin of each model, stored in `provenance.json` next to the files."""

import dataclasses
import importlib.metadata
import json
import platform
from pathlib import Path

from llorch.judging.goldens.forward import sha256
from small_models.shapes import Recipe

_PACKAGES = ("torch", "transformers", "tokenizers", "gguf", "llama-cpp-python", "numpy")


def note(path: Path, recipe: Recipe, losses: list[float], *, reader: str, difference: float) -> None:
    """Add or replace the entry of one model.

    Args:
        path: Its GGUF file or folder; `provenance.json` lies next to it.
        recipe: Recipe that it was made from.
        losses: Training loss of every step.
        reader: The engine that read it again.
        difference: Relative distance between that engine's logits and the trained model's.
    """
    file = path.with_name("provenance.json")
    entries = json.loads(file.read_text()) if file.exists() else {}
    tail = losses[-20:]
    entries[path.name.removesuffix(".gguf")] = {
        "script": "reference_outputs/make_models.py",
        "recipe": dataclasses.asdict(recipe),
        "first_loss": round(losses[0], 4),
        "final_loss": round(sum(tail) / len(tail), 4),
        f"{reader}_relative_difference": float(f"{difference:.2g}"),
        "bytes": sum(part.stat().st_size for part in ([path] if path.is_file() else path.iterdir())),
        "sha256": sha256(path),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "machine": platform.machine(),
    }
    file.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n")
