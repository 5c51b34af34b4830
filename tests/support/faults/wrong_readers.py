"""Readers of quantised folders that make one known mistake each, written beside llorch's: integers and loops of NumPy.

Each takes the tensors of a folder and returns the wrong matrices as float32, by the name of the weight.
"""

import json
from collections.abc import Callable, Iterator

import numpy as np
from builders.quantised_folders import Tensors

Matrices = dict[str, np.ndarray]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
DTYPES = {"I32": "<i4", "F16": "<f2", "F32": "<f4", "U8": "u1", "F8_E4M3": "u1", "I8": "i1"}


def array(tensors: Tensors, name: str) -> np.ndarray:
    dtype, shape, data = tensors[name]
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(data, DTYPES[dtype]).reshape(shape)


def modules(tensors: Tensors, suffix: str) -> Iterator[str]:
    return (name.removesuffix(suffix) for name in tensors if name.endswith(suffix))


def nibbles(words: np.ndarray, axis: int) -> np.ndarray:
    """Eight codes of 4 bits of each word, from the lowest bits, along an axis."""
    parts = np.stack([words.view(np.uint32) >> np.uint32(4 * i) & np.uint32(15) for i in range(8)], axis=axis + 1)
    shape = [*words.shape]
    shape[axis] *= 8
    return parts.reshape(shape).astype(np.int64)


def e4m3(code: np.ndarray) -> np.ndarray:
    sign, exponent, fraction = np.where(code >> 7, -1.0, 1.0), code.astype(int) >> 3 & 15, (code & 7) / 8
    return sign * np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7))


def gptq(tensors: Tensors, *, zero_offset: int = 1, in_order: bool = False, group: int = 0) -> Matrices:
    made = {}
    for module in modules(tensors, ".qweight"):
        codes, zeros = nibbles(array(tensors, f"{module}.qweight"), 0), nibbles(array(tensors, f"{module}.qzeros"), 1)
        scales, groups = array(tensors, f"{module}.scales").astype(np.float32), array(tensors, f"{module}.g_idx")
        groups = np.minimum((np.sort(groups) if in_order else groups) + group, len(scales) - 1)
        made[f"{module}.weight"] = (scales[groups] * (codes - (zeros[groups] + zero_offset)).astype(np.float32)).T
    return made


def awq(tensors: Tensors, *, places: tuple[int, ...] = (0, 4, 1, 5, 2, 6, 3, 7), zero_offset: int = 0) -> Matrices:
    made = {}
    for module in modules(tensors, ".qweight"):
        codes, zeros = (nibbles(array(tensors, f"{module}.{name}"), 1) for name in ("qweight", "qzeros"))
        codes, zeros = (each.reshape(len(each), -1, 8)[:, :, places].reshape(each.shape) for each in (codes, zeros))
        scales = array(tensors, f"{module}.scales").astype(np.float32)
        group = np.arange(len(codes)) * len(scales) // len(codes)
        made[f"{module}.weight"] = ((codes - zeros[group] - zero_offset) * scales[group]).astype(np.float32).T
    return made


def nvfp4(tensors: Tensors, *, multiplied: bool, low_first: bool = True) -> Matrices:
    made = {}
    for module in modules(tensors, ".weight_packed"):
        packed = array(tensors, f"{module}.weight_packed")
        both = (packed & 15, packed >> 4) if low_first else (packed >> 4, packed & 15)
        values = E2M1[np.stack(both, axis=2).reshape(len(packed), -1)]
        scale = np.repeat(e4m3(array(tensors, f"{module}.weight_scale")), 16, axis=1)
        whole = float(array(tensors, f"{module}.weight_global_scale")[0])
        made[f"{module}.weight"] = (values * (scale * whole if multiplied else scale / whole)).astype(np.float32)
    return made


def mxfp4_with_bias_128(tensors: Tensors) -> Matrices:
    made = {}
    for module in modules(tensors, ".weight_packed"):
        packed = array(tensors, f"{module}.weight_packed")
        values = E2M1[np.stack((packed & 15, packed >> 4), axis=2).reshape(len(packed), -1)]
        exponents = array(tensors, f"{module}.weight_scale").astype(int) - 128
        made[f"{module}.weight"] = np.ldexp(values, np.repeat(exponents, 32, axis=1)).astype(np.float32)
    return made


def fp8_divided(tensors: Tensors) -> Matrices:
    made = {}
    for module in modules(tensors, ".weight_scale_inv"):
        codes, scales = array(tensors, f"{module}.weight"), array(tensors, f"{module}.weight_scale_inv")
        spread = scales.repeat(128, 0).repeat(128, 1)[: codes.shape[0], : codes.shape[1]]
        made[f"{module}.weight"] = (e4m3(codes) / spread).astype(np.float32)
    return made


def bitsandbytes(tensors: Tensors, *, low_first: bool = False, table: np.ndarray | None = None) -> Matrices:
    made = {}
    for module in modules(tensors, ".weight.absmax"):
        state = next(tensors[name][2] for name in tensors if name.startswith(f"{module}.weight.quant_state"))
        shape = json.loads(state)["shape"]
        packed = array(tensors, f"{module}.weight").reshape(-1)
        both = (packed & 15, packed >> 4) if low_first else (packed >> 4, packed & 15)
        values = array(tensors, f"{module}.weight.quant_map") if table is None else table
        absmax = array(tensors, f"{module}.weight.absmax")
        flat = values[np.stack(both, axis=1).reshape(-1)].reshape(-1, 64) * absmax[:, None]
        made[f"{module}.weight"] = flat.reshape(shape).astype(np.float32)
    return made


def nvfp4_of_modelopt(tensors: Tensors, *, divided: bool) -> Matrices:
    made = {}
    for module in modules(tensors, ".weight_scale_2"):
        packed = array(tensors, f"{module}.weight")
        values = E2M1[np.stack((packed & 15, packed >> 4), axis=2).reshape(len(packed), -1)]
        scale, whole = e4m3(array(tensors, f"{module}.weight_scale")).astype(np.float32), f"{module}.weight_scale_2"
        scale = scale / array(tensors, whole) if divided else scale
        made[f"{module}.weight"] = values * np.repeat(scale, 16, axis=1)
    return made


def double_quantised_without_offset(tensors: Tensors) -> Matrices:
    made = {}
    for module in modules(tensors, ".weight.absmax"):
        stored = next(tensors[name][2] for name in tensors if name.startswith(f"{module}.weight.quant_state"))
        state = json.loads(stored)
        packed, codes = array(tensors, f"{module}.weight").reshape(-1), array(tensors, f"{module}.weight.absmax")
        levels = array(tensors, f"{module}.weight.nested_quant_map")[codes]
        nested = array(tensors, f"{module}.weight.nested_absmax")
        scales = levels * np.repeat(nested, state["nested_blocksize"])[: len(codes)]
        values = array(tensors, f"{module}.weight.quant_map")[np.stack((packed >> 4, packed & 15), axis=1).reshape(-1)]
        flat = values.reshape(-1, state["blocksize"]) * scales[:, None]
        made[f"{module}.weight"] = flat.reshape(state["shape"])
    return made


def ternary_times_the_scale(tensors: Tensors) -> Matrices:
    made = {}
    for module in modules(tensors, ".weight_scale"):
        packed = array(tensors, f"{module}.weight")
        codes = np.concatenate([packed >> 2 * quarter & 3 for quarter in range(4)]).astype(np.float32) - np.float32(1)
        made[f"{module}.weight"] = codes * array(tensors, f"{module}.weight_scale")
    return made


def bytes_as_weights(tensors: Tensors) -> Matrices:
    return {
        f"{module}.weight": array(tensors, f"{module}.weight").astype(np.float32) for module in modules(tensors, ".SCB")
    }


_FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
READERS: dict[str, Callable[[Tensors], Matrices]] = {
    "gptq-first-version-as-second": lambda tensors: gptq(tensors, zero_offset=0),
    "gptq-second-version-as-first": gptq,
    "group-index-ignored": lambda tensors: gptq(tensors, in_order=True),
    "folder-group-one-on": lambda tensors: gptq(tensors, group=1),
    "awq-plain-order": lambda tensors: awq(tensors, places=(*range(8),)),
    "awq-zero-point-plus-one": lambda tensors: awq(tensors, zero_offset=1),
    "global-scale-turned": lambda tensors: nvfp4(tensors, multiplied=True),
    "folder-upper-half-first": lambda tensors: nvfp4(tensors, multiplied=False, low_first=False),
    "exponent-bias-128": mxfp4_with_bias_128,
    "fp8-scale-divided": fp8_divided,
    "bitsandbytes-lower-half-first": lambda tensors: bitsandbytes(tensors, low_first=True),
    "nf4-as-fp4": lambda tensors: bitsandbytes(tensors, table=np.concatenate([_FP4, -_FP4])),
    "nested-offset-dropped": double_quantised_without_offset,
    "bitnet-scale-turned": ternary_times_the_scale,
}
# Readers of further folders, by mistake and folder.
FURTHER_READERS: dict[tuple[str, str], Callable[[Tensors], Matrices]] = {
    ("global-scale-turned", "modelopt-nvfp4"): lambda tensors: nvfp4_of_modelopt(tensors, divided=True),
    ("global-scale-dropped", "modelopt-nvfp4"): lambda tensors: nvfp4_of_modelopt(tensors, divided=False),
    ("folder-scale-dropped", "bnb-int8"): bytes_as_weights,
}
