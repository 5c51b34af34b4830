"""The small quantised folders of the repository, and copies of them with other settings or other tensors."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from builders.safetensors_bytes import safetensors_bytes

FOLDERS = Path(__file__).parents[3] / "reference_outputs" / "quantised_folders"
NOT_READ = ("gpt-oss-mxfp4",)  # of a family that llorch refuses
NAMES = sorted(path.parent.name for path in FOLDERS.glob("*/config.json") if path.parent.name not in NOT_READ)

Tensor = tuple[str, list[int], bytes]  # dtype, shape, data
Tensors = dict[str, Tensor]


def tensors_of(folder: Path) -> Tensors:
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = data[8 + length :]
    return {
        name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])]) for name, entry in header.items()
    }


def written(folder: Path, config: Mapping[str, object], tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    header, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(header, body))
    return folder


def changed(
    target: Path,
    name: str,
    settings: Callable[[dict[str, Any]], object] = lambda values: None,
    tensors: Callable[[Tensors], object] = lambda values: None,
) -> Path:
    """A copy of a folder whose settings and tensors were changed in place."""
    config = json.loads((FOLDERS / name / "config.json").read_text())
    stored = tensors_of(FOLDERS / name)
    settings(config["quantization" if "quantization" in config else "quantization_config"])
    tensors(stored)
    return written(target / name, config, stored)
