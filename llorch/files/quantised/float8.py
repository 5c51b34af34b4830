"""Matrices of E4M3 bytes with a scale per matrix, row, block, or 32 columns.

    fp8           weight_scale_inv for blocks (DeepSeek, Qwen) or one number; it is multiplied, despite its name
    fbgemm_fp8    weight_scale for each row
    mxfp8         weight_scale_inv of E8M0 for 32 columns of a row

Source: transformers `integrations/finegrained_fp8.py` and `fbgemm_fp8.py`; DeepSeek-V3 `inference/kernel.py`.
"""

from collections.abc import Callable, Mapping

import numpy as np

from llorch.files.packed import Rows
from llorch.files.quantised.codes import E4M3, E8M0
from llorch.files.quantised.matrix import Parts, Reader, Recipe, Unpacker, floats_of
from llorch.files.quantised.source import Shape, Source, matches_part, names_in, two_sizes

_SCALES = ("F32", "BF16", "F16")  # dtypes of scales
_EXPONENTS = ("F8_E8M0", "U8")  # dtypes of E8M0 scales
_NAMES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")  # suffixes of scales, by priority


def read_fp8(source: Source) -> None:
    """Find the matrices of a folder of `quant_method: "fp8"` or `"mxfp8"`."""
    settings = source.settings
    settings.refuse("fmt", unless=("e4m3", "float8_e4m3fn"), default="e4m3")
    block = two_sizes(settings, "weight_block_size") if settings.has("weight_block_size") else None
    for module in eight_bit_modules(source, *_NAMES):
        suffix = next((name for name in _NAMES if source.has(module, name)), _NAMES[0])
        if settings.text("quant_method") == "mxfp8":
            add_mx(source, module, suffix)
        elif block is None:
            add_scaled(source, module, suffix, "FP8, one scale", lambda shape: [(), (1,), (1, 1)])
        else:
            add_blocks(source, module, suffix, block, "weight_block_size")
    for key in ("modules_to_not_convert", "ignored_layers"):
        source.require_not_quantised(key, names_in(source, key), matches_part)
    source.leave_out("activation_scale", "input_scale", "qscale_act")


def read_fbgemm(source: Source) -> None:
    """Find the matrices of a folder of `quant_method: "fbgemm_fp8"`."""
    for module in eight_bit_modules(source, "weight_scale"):
        add_scaled(source, module, "weight_scale", "FP8, one scale a row", lambda shape: [(shape[0], 1), (shape[0],)])
    source.require_not_quantised("modules_to_not_convert", names_in(source, "modules_to_not_convert"), matches_part)
    source.leave_out("input_scale_ub", "input_scale")


def eight_bit_modules(source: Source, *scales: str) -> list[str]:
    """Return the modules whose weight has E4M3 bytes, or is missing although a scale of these names exists."""
    without_weight = [module for module in source.modules(*scales) if not source.has(module, "weight")]
    return source.modules(dtypes=["F8_E4M3"]) + without_weight


def add_scaled(
    source: Source,
    module: str,
    suffix: str,
    name: str,
    shapes: Callable[[Shape], list[Shape]],
    *,
    values: np.ndarray = E4M3,
    dtype: str = "F8_E4M3",
    factor: np.float32 | None = None,
) -> None:
    """Add a matrix of bytes with one scale, or one per row; `shapes` returns the allowed shapes of the scale."""
    shape = source.shape(module, "weight")
    parts = {"weight": source.take(module, "weight", [dtype]), "scale": source.take(module, suffix, _SCALES)}
    if (actual := source.tensors[parts["scale"]].shape) not in (allowed := shapes(shape)):
        message = f"{parts['scale']}: expected {' or '.join(map(str, allowed))}, got {actual}"
        raise source.error("Shape", f"{message}, which quantization_config does not ask for")
    recipe = Recipe(
        codes=Unpacker("weight", 8, shape), values=values, scale=floats_of("scale"), factor=factor, group=shape[1]
    )
    source.add(module, name, shape, parts, recipe)


def add_blocks(source: Source, module: str, suffix: str, block: tuple[int, int], key: str) -> None:
    """Add a matrix of E4M3 bytes with a scale per block; the last blocks may be smaller."""
    shape = n_out, n_in = source.shape(module, "weight")
    scale_shape = -(-n_out // block[0]), -(-n_in // block[1])
    parts: Mapping[str, str] = {
        "weight": source.take(module, "weight", ["F8_E4M3"]),
        "scale": source.take(module, suffix, (*_SCALES, *_EXPONENTS), scale_shape, f"{key} {list(block)}"),
    }
    recipe = Recipe(
        codes=Unpacker("weight", 8, shape), values=E4M3, scale=_block_scales(block[0]), group=block[1], zero_scales=True
    )
    source.add(module, f"FP8, blocks of {block[0]} x {block[1]}", shape, parts, recipe)


def _block_scales(block_rows: int) -> Reader:
    """Return the reader of each row's scales: floats, or powers of two in bytes."""
    floats = floats_of("scale", block=block_rows)

    def read(parts: Parts, rows: Rows) -> np.ndarray:
        if parts["scale"].dtype != "U8":
            return floats(parts, rows)
        ids = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        return E8M0[parts["scale"].array[ids // block_rows]]

    return read


def add_mx(source: Source, module: str, suffix: str) -> None:
    """Add a matrix of E4M3 bytes with an E8M0 exponent per 32 columns."""
    shape = n_out, n_in = source.shape(module, "weight")
    parts = {
        "weight": source.take(module, "weight", ["F8_E4M3"]),
        "scale": source.take(module, suffix, _EXPONENTS, (n_out, n_in // 32), "MXFP8"),
    }
    recipe = Recipe(codes=Unpacker("weight", 8, shape), values=E4M3, scale=exponents_of("scale"), group=32)
    source.add(module, "MXFP8, groups of 32", shape, parts, recipe)


def exponents_of(part: str) -> Reader:
    """Return a reader of E8M0 bytes of any stored dtype."""
    return lambda parts, rows: E8M0[parts[part].array[rows]]
