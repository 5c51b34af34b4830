"""A copy of a built-in model, tokenizer included, as a quantised folder: bytes with one scale a row."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from builders.quantised_folders import Tensors, tensors_of, written
from llorch.files.convert import convert
from llorch.runtime.builtin import builtin_path

WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
SETTINGS: Mapping[str, Any] = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}}, "ignore": ["lm_head"],
}  # fmt: skip


def quantised_copy(model: str, folder: Path) -> Path:
    """Write it with compressed-tensors' settings; the scales are float32 numbers."""
    convert(builtin_path(model), folder)
    tensors: Tensors = {}
    for name, (dtype, shape, data) in tensors_of(folder).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = dtype, shape, data
            continue
        array = np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[dtype]).reshape(shape).astype(np.float64)
        scale = (np.abs(array).max(1, keepdims=True) / 127).astype(np.float32)
        tensors[name] = "I8", shape, np.rint(array / scale).astype(np.int8).tobytes()
        tensors[f"{name}_scale"] = "F32", [shape[0], 1], scale.tobytes()
    config = json.loads((folder / "config.json").read_text())
    return written(folder, config | {"quantization_config": SETTINGS}, tensors)
