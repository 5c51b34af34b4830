"""Quantised Hugging Face folders of a real shape with random codes and scales, to measure speed and memory."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .models import forget

Tensors = dict[str, tuple[str, np.ndarray]]  # dtype of the file, array
Shape = tuple[int, int]  # out, in
_GROUP = 128
_CT: dict[str, Any] = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}


class Draws:
    """Random codes and scales."""

    def __init__(self) -> None:
        """Start."""
        self.rng = np.random.default_rng(0)

    def codes(self, *shape: int, dtype: type = np.uint32) -> np.ndarray:
        """Draw codes with all bit patterns."""
        return np.frombuffer(self.rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape)

    def scales(self, *shape: int, size: float = 0.004, sign: float = 1) -> np.ndarray:
        """Draw positive numbers around a size."""
        return (sign * size * self.rng.uniform(0.5, 1.5, shape)).astype(np.float32)

    def e4m3(self, *shape: int) -> np.ndarray:
        """Draw bytes of E4M3 without NaN."""
        codes = self.codes(*shape, dtype=np.uint8).copy()
        codes[codes & 127 > 120] = 0
        return codes


def bf16(array: np.ndarray) -> tuple[str, np.ndarray]:
    """Truncate float32 to BF16."""
    return "BF16", (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def f16(array: np.ndarray) -> tuple[str, np.ndarray]:
    """Round to F16."""
    return "F16", array.astype(np.float16)


def _gptq(draw: Draws, shape: Shape, bits: int) -> Tensors:
    out, n_in = shape
    zeros = np.full((n_in // _GROUP, out * bits // 32), 0x77777777 if bits == 4 else 0x7F7F7F7F, np.uint32)
    return {
        "qweight": ("I32", draw.codes(n_in * bits // 32, out)), "qzeros": ("I32", zeros),
        "scales": f16(draw.scales(n_in // _GROUP, out)),
        "g_idx": ("I32", (np.arange(n_in) // _GROUP).astype(np.int32)),
    }  # fmt: skip


def _awq(draw: Draws, shape: Shape) -> Tensors:
    out, n_in = shape
    return {
        "qweight": ("I32", draw.codes(n_in, out // 8)), "qzeros": ("I32", draw.codes(n_in // _GROUP, out // 8)),
        "scales": f16(draw.scales(n_in // _GROUP, out)),
    }  # fmt: skip


def _pack(draw: Draws, shape: Shape) -> Tensors:
    out, n_in = shape
    return {
        "weight_packed": ("I32", draw.codes(out, n_in // 8)),
        "weight_scale": bf16(draw.scales(out, n_in // _GROUP)),
        "weight_shape": ("I64", np.array(shape)),
    }


def _nf4(draw: Draws, shape: Shape) -> Tensors:
    size = shape[0] * shape[1]
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [*shape]}
    return {
        "weight": ("U8", draw.codes(size // 2, 1, dtype=np.uint8)),
        "weight.absmax": ("F32", draw.scales(size // 64, size=0.05)),
        "weight.quant_map": ("F32", np.linspace(-1, 1, 16, dtype=np.float32)),
        "weight.quant_state.bitsandbytes__nf4": ("U8", np.frombuffer(json.dumps(state).encode(), np.uint8)),
    }


def _mlx(draw: Draws, shape: Shape, bits: int) -> Tensors:
    out, n_in = shape
    size = 0.005 * 15 / (2**bits - 1)
    return {
        "weight": ("U32", draw.codes(out, n_in * bits // 32)),
        "scales": bf16(draw.scales(out, n_in // 64, size=size)),
        "biases": bf16(draw.scales(out, n_in // 64, size=size * 2 ** (bits - 1), sign=-1)),
    }


def _bytes(draw: Draws, shape: Shape, dtype: str) -> Tensors:
    codes = draw.e4m3(*shape) if dtype == "F8_E4M3" else draw.codes(*shape, dtype=np.int8)
    return {"weight": (dtype, codes), "weight_scale": bf16(draw.scales(shape[0], 1, size=2e-4))}


def _ct(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "format": form, "weights": {"symmetric": True, "dynamic": False, **weights}}
    return _CT | {"format": form, "config_groups": {"group_0": group}}


_GPTQ_SETTINGS: dict[str, Any] = {"quant_method": "gptq", "group_size": _GROUP, "desc_act": False, "sym": True}
KINDS: Mapping[str, tuple[dict[str, Any], Callable[[Draws, Shape], Tensors]]] = {  # settings, tensors of a matrix
    "float": ({}, lambda draw, shape: {"weight": bf16(draw.scales(*shape) * np.sign(draw.rng.random(shape) - 0.5))}),
    "GPTQ 4-bit": (_GPTQ_SETTINGS | {"bits": 4}, lambda draw, shape: _gptq(draw, shape, 4)),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm"}, _awq),
    "W4A16": (_ct("pack-quantized", num_bits=4, type="int", strategy="group", group_size=_GROUP), _pack),
    "NF4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, _nf4),
    "MLX 4-bit": ({"bits": 4, "group_size": 64, "mode": "affine"}, lambda draw, shape: _mlx(draw, shape, 4)),
    "GPTQ 8-bit": (_GPTQ_SETTINGS | {"bits": 8}, lambda draw, shape: _gptq(draw, shape, 8)),
    "W8A16": (_ct("int-quantized", num_bits=8, type="int", strategy="channel"), lambda d, s: _bytes(d, s, "I8")),
    "FP8": (_ct("float-quantized", num_bits=8, type="float", strategy="channel"), lambda d, s: _bytes(d, s, "F8_E4M3")),
    "MLX 8-bit": ({"bits": 8, "group_size": 64, "mode": "affine"}, lambda draw, shape: _mlx(draw, shape, 8)),
}

EIGHT_BITS = ("GPTQ 8-bit", "W8A16", "FP8", "MLX 8-bit")


def write_folder(kind: str, config: dict[str, object], folder: Path) -> Path:
    """Write a folder of a kind for a configuration; embeddings and norms in BF16, as in published folders."""
    from llorch.families.read_huggingface import config_from_huggingface
    from llorch.files.tensor_names import huggingface_tensors

    settings, matrix = KINDS[kind]
    folder.mkdir()
    key = "quantization" if kind.startswith("MLX") else "quantization_config"
    (folder / "config.json").write_text(
        json.dumps(config | {"torch_dtype": "bfloat16"} | ({key: settings} if settings else {}))
    )
    draw, arrays = Draws(), dict[str, tuple[str, np.ndarray]]()
    for tensor in huggingface_tensors(config_from_huggingface(config, path=folder)):
        module = tensor.name.removesuffix(".weight")
        if tensor.name.endswith("_proj.weight"):
            out, n_in = tensor.shape
            arrays |= {f"{module}.{name}": packed for name, packed in matrix(draw, (out, n_in)).items()}
        else:
            array = 0.02 * draw.rng.standard_normal(tensor.shape, dtype=np.float32)
            arrays[tensor.name] = bf16(array + 1 if "norm" in tensor.name else array)
    _save(arrays, folder / "model.safetensors", mlx=kind.startswith("MLX"))
    return folder


def _save(tensors: Tensors, path: Path, *, mlx: bool) -> None:
    """Write a safetensors file; the package of that name writes no FP8 of NumPy."""
    header: dict[str, object] = {"__metadata__": {"format": "mlx" if mlx else "pt"}}
    for (name, (dtype, array)), (start, stop) in zip(tensors.items(), _data_offsets(tensors), strict=True):
        header[name] = {"dtype": dtype, "shape": [*array.shape], "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in tensors.values():
            file.write(np.ascontiguousarray(array).data)
    forget(path)


def _data_offsets(tensors: Tensors) -> Iterator[tuple[int, int]]:
    offset = 0
    for _, array in tensors.values():
        yield offset, offset + array.nbytes
        offset += array.nbytes
