"""The small quantised folders of the repository, copies of them, and built-in models as such folders."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from builders.safetensors_bytes import safetensors_bytes
from llorch.files.convert import convert
from llorch.runtime.builtin import builtin_path

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


def in_fp8(target: Path, name: str) -> Path:
    """A built-in model whose projections are codes in E4M3, with a scale for each block of 16 x 16."""
    convert(builtin_path(name), target)
    config, tensors = json.loads((target / "config.json").read_text()), tensors_of(target)
    for key, (_, shape, data) in [*tensors.items()]:
        if re.search(r"_proj\w*\.weight$", key):
            codes, scales = _blocks_of_fp8(np.frombuffer(data, np.float32).reshape(shape))
            tensors[key] = ("F8_E4M3", shape, codes.tobytes())
            tensors[f"{key}_scale_inv"] = ("F32", [*scales.shape], scales.tobytes())
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    return written(target, config | {"quantization_config": settings}, tensors)


def _blocks_of_fp8(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    import torch

    n_out, n_in = matrix.shape
    padded = np.pad(np.abs(matrix), [(0, -n_out % 16), (0, -n_in % 16)])
    scales = padded.reshape(len(padded) // 16, 16, -1, 16).max(axis=(1, 3)) / 448
    each = scales.repeat(16, axis=0)[:n_out].repeat(16, axis=1)[:, :n_in]
    return torch.from_numpy(matrix / each).to(torch.float8_e4m3fn).view(torch.uint8).numpy(), scales
