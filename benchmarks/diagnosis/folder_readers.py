"""Independent readers of quantised folders: bytes to matrices, from the descriptions of the formats.

Every reader is right with its defaults. Each keyword is a mistake that readers of other engines made. The readers
use nothing of llorch: they parse the file, unpack bits, and compute in float64.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
E2M1 = np.concatenate([E2M1, -E2M1])
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]  # column of each nibble, from the lowest
_DTYPES = {"I32": "<i4", "U32": "<u4", "F16": "<f2", "F32": "<f4", "I64": "<i8", "I8": "i1", "U8": "u1"}
Matrices = dict[str, np.ndarray]  # float64, by the name of the weight


@dataclass(frozen=True)
class Folder:
    """Settings and tensors of a folder; BF16 as floats, F8_E4M3 as bytes."""

    settings: dict[str, Any]
    tensors: dict[str, np.ndarray]

    def modules(self, ending: str) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        """Yield name and tensors of every module that has a tensor with this ending."""
        for name in self.tensors:
            if name.endswith(f".{ending}"):
                module = name.removesuffix(f".{ending}")
                inner = {k.removeprefix(f"{module}."): t for k, t in self.tensors.items() if k.startswith(f"{module}.")}
                yield module, inner


def opened(folder: Path) -> Folder:
    """Parse config.json and model.safetensors."""
    config = json.loads((folder / "config.json").read_text())
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            tensors[name] = _array(entry["dtype"], data[8 + size + start : 8 + size + stop], entry["shape"])
    return Folder(config.get("quantization") or config["quantization_config"], tensors)


def _array(dtype: str, data: bytes, shape: list[int]) -> np.ndarray:
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(data, _DTYPES.get(dtype, "u1")).reshape(shape)


def unpacked(words: np.ndarray, bits: int, n: int) -> np.ndarray:
    """Return the codes of each row, packed from the lowest bit of the first word."""
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1), 1, bitorder="little")
    return stream[:, : n * bits].reshape(len(words), n, bits) @ (1 << np.arange(bits))


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Return the numbers of one sign bit, four bits of exponent and three of fraction."""
    codes = codes.astype(np.int64)
    exponent, fraction = codes >> 3 & 15, codes & 7
    size = np.where(exponent, np.ldexp(1 + fraction / 8, exponent - 7), np.ldexp(fraction / 8, -6))
    return np.where(codes & 128, -size, size)


def nibbles(data: np.ndarray, *, upper_first: bool = False) -> np.ndarray:
    """Return the two codes of each byte."""
    halves = [data & 15, data >> 4]
    return np.stack(halves[::-1] if upper_first else halves, -1).reshape(*data.shape[:-1], -1)


def gptq(
    folder: Folder, *, added: int | None = None, wraps: bool = True, words: bool = False,
    sorted_groups: bool = False, columns: list[int] | None = None, signed: bool = False,
) -> Matrices:  # fmt: skip
    """Read GPTQ, both versions: the first stores zero points minus one, modulo 2^bits."""
    bits, matrices = folder.settings["bits"], {}
    zero_offset = int(folder.settings.get("checkpoint_format", "gptq") == "gptq") if added is None else added
    for module, t in folder.modules("qweight"):
        n_in, n_out = len(t["qweight"]) * 32 // bits, t["scales"].shape[1]
        codes = unpacked(t["qweight"].T, bits, n_in)
        if columns:
            codes = codes.reshape(n_out, -1, 8)[:, :, columns].reshape(n_out, n_in)
        if words:
            zeros = unpacked(t["qzeros"].view(np.uint32) + np.uint32(0x11111111), bits, n_out)
        else:
            zeros = unpacked(t["qzeros"], bits, n_out) + zero_offset
            zeros = zeros % 2**bits if wraps else zeros
        if signed:
            codes, zeros = codes - (codes >= 2 ** (bits - 1)) * 2**bits, zeros * 0
        size = n_in if folder.settings["group_size"] == -1 else folder.settings["group_size"]
        group = np.sort(t["g_idx"]) if sorted_groups else t.get("g_idx", np.arange(n_in) // size)
        matrices[f"{module}.weight"] = (codes - zeros.T[:, group]) * t["scales"].astype(np.float64).T[:, group]
    return matrices


def awq(
    folder: Folder, *, columns: list[int] = AWQ_COLUMNS, added: int = 0, middle: bool = False, rounded: bool = False
) -> Matrices:
    """Read AWQ gemm: eight columns in a word."""
    size, matrices = folder.settings["group_size"], {}
    order = np.argsort(columns)
    for module, t in folder.modules("qweight"):
        codes, zeros = (
            unpacked(t[name], 4, t[name].shape[1] * 8)
            .reshape(len(t[name]), -1, 8)[:, :, order]
            .reshape(len(t[name]), -1)
            for name in ("qweight", "qzeros")
        )
        zeros = np.full_like(zeros, 8) if middle else zeros + added
        group = np.arange(len(codes)) // size
        scales = t["scales"].astype(np.float64)
        if rounded:  # as in engines with a scale and an offset per group
            matrices[f"{module}.weight"] = (codes * scales[group] - (zeros * scales).astype(np.float16)[group]).T
        else:
            matrices[f"{module}.weight"] = ((codes - zeros[group]) * scales[group]).T
    return matrices


def packed(
    folder: Folder, *, dense: bool = False, middle: bool = True, signed: bool = False, zeros_by_row: bool = True
) -> Matrices:
    """Read `pack-quantized` of compressed-tensors; codes of 3 bits may have gaps."""
    weights, matrices = folder.settings["config_groups"]["group_0"]["weights"], {}
    bits = weights["num_bits"]
    for module, t in folder.modules("weight_packed"):
        n_out, n_in = t["weight_shape"]
        if bits == 3 and not dense and t["weight_packed"].shape[1] > -(-n_in * 3 // 32):
            codes = np.concatenate([unpacked(t["weight_packed"][:, [i]], 3, 10) for i in range(-(-n_in // 10))], 1)
        else:
            codes = unpacked(t["weight_packed"], bits, n_in)
        scales = np.repeat(t["weight_scale"].astype(np.float64), n_in // t["weight_scale"].shape[1], 1)
        zeros = np.full(scales.shape, 2 ** (bits - 1))
        if "weight_zero_point" in t and zeros_by_row:
            zeros = np.repeat(unpacked(t["weight_zero_point"].T, bits, n_out).T, n_in // t["weight_scale"].shape[1], 1)
        if signed:
            codes, zeros = codes - (codes >= 2 ** (bits - 1)) * 2**bits, 0 * zeros
        matrices[f"{module}.weight"] = (codes[:, :n_in] - (zeros if middle else 0)) * scales
    return matrices


def fp8(
    folder: Folder, *, divides: bool = False, equal: bool = False, tiled: bool = False, dtype: Any = None,
    single_scale: bool = False,
) -> Matrices:  # fmt: skip
    """Read FP8 in blocks of 128 x 128, the last of which may be partial; `weight_scale_inv` is a factor."""
    matrices = {}
    for module, t in folder.modules("weight_scale_inv"):
        scales = t["weight_scale_inv"]
        scales = (scales if dtype is None else dtype(scales)).astype(np.float64)
        rows, columns = (
            np.arange(length) % n if tiled else np.arange(length) // (-(-length // n) if equal else 128)
            for length, n in zip(t["weight"].shape, scales.shape, strict=True)
        )
        spread = scales[rows * (not single_scale)][:, columns * (not single_scale)]
        matrices[f"{module}.weight"] = e4m3(t["weight"]) / spread if divides else e4m3(t["weight"]) * spread
    return matrices


def nvfp4(
    folder: Folder, *, multiplies: bool | None = None, upper_first: bool = False, with_global_scale: bool = True,
    integers: bool = False,
) -> Matrices:  # fmt: skip
    """Read NVFP4 of compressed-tensors, which divides by the matrix's scale, and of ModelOpt, which multiplies."""
    matrices, is_modelopt = {}, folder.settings["quant_method"] == "modelopt"
    codes_name, scale_name = ("weight", "weight_scale_2") if is_modelopt else ("weight_packed", "weight_global_scale")
    for module, t in folder.modules(scale_name):
        matrix_scale = float(t[scale_name].reshape(-1)[0])
        factor = matrix_scale if (is_modelopt if multiplies is None else multiplies) else 1 / matrix_scale
        scales = t["weight_scale"].astype(np.float64) if integers else e4m3(t["weight_scale"])
        values = E2M1[nibbles(t[codes_name], upper_first=upper_first)]
        matrices[f"{module}.weight"] = values * np.repeat(scales * (factor if with_global_scale else 1), 16, 1)
    return matrices


def mxfp4(folder: Folder, *, bias: int = 127, signed: bool = False, upper_first: bool = False) -> Matrices:
    """Read MXFP4: E2M1 codes, and a power of two for 32 columns."""
    matrices = {}
    for module, t in folder.modules("weight_packed"):
        exponent = t["weight_scale"].view(np.int8).astype(int) if signed else t["weight_scale"].astype(int) - bias
        values = E2M1[nibbles(t["weight_packed"], upper_first=upper_first)]
        matrices[f"{module}.weight"] = np.ldexp(values, np.repeat(exponent, 32, 1))
    return matrices


def bitsandbytes(
    folder: Folder, *, lower_first: bool = False, offset: bool = True, table: np.ndarray | None = None,
    divisor: float = 127.0, nested_size: int = 256,
) -> Matrices:  # fmt: skip
    """Read bitsandbytes: blocks of 64 across rows, the first code in the upper half; or int8 rows."""
    read = {}
    for module, t in folder.modules("SCB"):
        read[f"{module}.weight"] = t["weight"] * t["SCB"].astype(np.float64)[:, None] / divisor
    for module, t in folder.modules("weight.quant_map"):
        state = json.loads(next(value for key, value in t.items() if "quant_state" in key).tobytes())
        scales = t["weight.absmax"].astype(np.float64)
        if "weight.nested_absmax" in t:
            scales = t["weight.nested_quant_map"].astype(np.float64)[t["weight.absmax"]]
            scales = (
                scales
                * t["weight.nested_absmax"][np.arange(len(scales)) // nested_size % len(t["weight.nested_absmax"])]
            )
            scales = scales + (state["nested_offset"] if offset else 0)
        values = t["weight.quant_map"].astype(np.float64) if table is None else table
        flat = values[nibbles(t["weight"].reshape(-1), upper_first=not lower_first)][: math.prod(state["shape"])]
        read[f"{module}.weight"] = (flat * np.repeat(scales, state["blocksize"])[: flat.size]).reshape(state["shape"])
    return read


def mlx(folder: Folder, *, biases: float = 1.0, upper_first: bool = False) -> Matrices:
    """Read MLX, affine: code times scale plus bias."""
    bits, size, matrices = folder.settings["bits"], folder.settings["group_size"], {}
    for module, t in folder.modules("biases"):
        n_in = t["scales"].shape[1] * size
        codes = unpacked(t["weight"], bits, n_in)
        codes = codes.reshape(len(codes), -1, 2)[:, :, ::-1].reshape(codes.shape) if upper_first else codes
        scale, bias = (np.repeat(t[name].astype(np.float64), size, 1) for name in ("scales", "biases"))
        matrices[f"{module}.weight"] = codes * scale + bias * biases
    return matrices


def with_quantised_head(folder: Folder, reader: Callable[[Folder], Matrices], kind: str) -> Matrices:
    """Read correctly, and quantise the output matrix too, like loaders that ignore the list of modules to skip."""
    head = folder.tensors["lm_head.weight"].astype(np.float64)
    flat = head.reshape(-1, {"nf4": 64, "int4": 32, "int8": head.shape[1]}[kind])
    largest = np.abs(flat).max(1, keepdims=True)
    if kind == "nf4":
        _, t = next(folder.modules("weight.quant_map"))
        table = t["weight.quant_map"].astype(np.float64)
        quantised_head = table[np.abs((flat / largest)[..., None] - table).argmin(-1)] * largest
    elif kind == "int4":  # compressed-tensors: 15 steps cover twice the largest number, scales are bfloat16
        scale = (largest / 7.5).astype(np.float32)
        scale = ((scale.view(np.uint32) + 0x8000) >> 16 << 16).astype(np.uint32).view(np.float32).astype(np.float64)
        quantised_head = np.clip(np.rint(flat / scale), -8, 7) * scale
    else:
        quantised_head = np.rint(flat * (127 / largest)) * largest / 127
    return reader(folder) | {"lm_head.weight": quantised_head.reshape(head.shape)}
