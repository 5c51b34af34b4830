"""compressed-tensors: groups of modules, each with its own scheme and format.

    pack-quantized         codes of 2 to 8 bits in 32-bit words along the columns, offset by half their range
    int-quantized          signed bytes
    float-quantized        E4M3 bytes; one scale per matrix, row or block
    nvfp4-pack-quantized   E2M1, E4M3 scales of 16 columns, divided by a global scale
    mxfp4-pack-quantized   E2M1, E8M0 exponents of 32 columns
    mxfp8-quantized        E4M3, E8M0 exponents of 32 columns

Codes of 3 bits are packed without gaps, or in files before 2026 ten per word; the tensor width distinguishes them.
Scales of activations and of the cache are unused here. Only scheme numerics, which round activations as the settings
say, need them; `files/quantised/activations.py` reads them.

Source: compressed-tensors 0.20 `compressors/` and `quantization/quant_args.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llorch.files.packed import Rows
from llorch.files.quantised.codes import E2M1, INT8, codes_across, integers, ten_per_word
from llorch.files.quantised.float8 import add_blocks, add_mx, add_scaled, exponents_of
from llorch.files.quantised.matrix import Parts, Reader, Recipe, Unpacker, floats_of, grouping, name_groups
from llorch.files.quantised.source import Shape, Source, matches_module, n_groups, names_in, two_sizes
from llorch.runtime.fields import Fields

_FLOATS = ("BF16", "F16", "F32")  # dtypes of scales


@dataclass(frozen=True, slots=True)
class ModuleGroup:
    """Group of modules with one scheme."""

    targets: list[str]
    settings: Fields  # of the group; `activations.py` reads its input_activations
    weights: Fields  # settings of the weights
    format: str


def read_compressed_tensors(source: Source) -> None:
    """Find the matrices of a folder of `quant_method: "compressed-tensors"`."""
    _refuse_transforms(source.settings)
    groups, ignored = groups_of(source.settings), names_in(source, "ignore")
    for module in source.modules("weight_packed", "weight_scale", dtypes=["I8", "F8_E4M3"]):  # dtypes of `weight`
        group = group_of(source, groups, module)
        if group.format not in _FORMATS:
            raise source.settings.error("Unsupported", "format", " or ".join(sorted(_FORMATS)), group.format)
        _FORMATS[group.format](source, module, group.weights)
    source.require_not_quantised("ignore", ignored, matches_module)
    _require_quantised(source, groups, ignored)
    source.note_unmatched("targets", [target for group in groups for target in group.targets], matches_module)
    source.leave_out("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")
    source.leave_out("weight_shape", "k_scale", "v_scale", "q_scale")  # weight_shape is no part of a matrix


def _refuse_transforms(settings: Fields) -> None:
    """Raise Unsupported for rotated or sparse weights."""
    for key in ("transform_config", "sparsity_config"):
        section = settings.section(key)
        values = {} if section is None else section.values
        is_dense = values.get("format") in (None, "dense") and not values.get("config_groups")
        if values and not is_dense:
            raise settings.error("Unsupported", key, "nothing, or a dense format", values)


def groups_of(settings: Fields) -> list[ModuleGroup]:
    """Read the groups of modules that have quantised weights."""
    section = settings.section("config_groups")
    if section is None:
        raise settings.error("Missing", "config_groups", "groups of modules", None)
    groups = []
    for name in section.values:
        group = section.section(name)
        weights = None if group is None else group.section("weights")
        if group is None or weights is None:
            continue  # activations or caches only
        targets = group.values.get("targets")
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise group.error("Malformed", f"config_groups.{name}.targets", "a list of names", targets)
        format_name = (group if group.has("format") else settings).text("format")
        if format_name == "naive-quantized":  # floats or integers
            format_name = "float-quantized" if weights.text("type", default="int") == "float" else "int-quantized"
        groups.append(ModuleGroup(targets, group, weights, format_name))
    return groups


def group_of(source: Source, groups: list[ModuleGroup], module: str) -> ModuleGroup:
    """Return the group of a module; a match by name or expression has priority over a match by class."""
    for group in groups:
        if any(matches_module(target, module) for target in group.targets):
            return group
    for group in groups:
        if "Linear" in group.targets:
            return group
    raise source.error("Inconsistent", f"config_groups: no target names {module}, which has quantised tensors")


def _require_quantised(source: Source, groups: list[ModuleGroup], ignored: list[str]) -> None:
    """Raise Inconsistent for a float projection that should be quantised by the settings."""
    targets = [target for group in groups for target in group.targets]
    for name in source.tensors:
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or name in source.found:
            continue
        is_targeted = any(target == "Linear" or matches_module(target, module) for target in targets)
        if is_targeted and not any(pattern == "Linear" or matches_module(pattern, module) for pattern in ignored):
            raise source.error("Inconsistent", f"config_groups names {module}, but {name} is not quantised")


def _add_packed(source: Source, module: str, weights: Fields) -> None:
    """Add a matrix of integer codes in 32-bit words, with zero points unless the scheme is symmetric."""
    bits, symmetric = weights.integer("num_bits"), weights.boolean("symmetric", default=True)
    if not 2 <= bits <= 8:
        raise weights.error("OutOfRange", "num_bits", "2 to 8", bits)
    n_out, n_in = _read_shape(source, module)
    n_words = source.shape(module, "weight_packed")[1]
    # Files before 2026; if both formats need equally many words, there are no gaps.
    has_gaps = bits == 3 and n_words == -(-n_in // 10) and n_words != -(-n_in * 3 // 32)
    if not has_gaps and n_words != -(-n_in * bits // 32):
        expected = f"{-(-n_in * bits // 32)} words a row (num_bits {bits})"
        raise source.error("Shape", f"{module}.weight_packed: expected {expected}, got {n_words}")
    size, groups, parts = _scales(source, module, weights, n_out, n_in)
    parts["codes"] = source.take(module, "weight_packed", ["I32"], (n_out, n_words))
    zero = None
    if not symmetric:
        zeros = -(-n_out * bits // 32), groups
        parts["zero"] = source.take(module, "weight_zero_point", ["I32"], zeros, "symmetric false")
        zero = _zero_points(bits, n_out)

    def with_gaps(stored_parts: Parts, rows: Rows) -> np.ndarray:
        return ten_per_word(stored_parts["codes"].array[rows], n_in)

    codes = with_gaps if has_gaps else Unpacker("codes", bits, (n_out, n_in))
    values = integers(bits, offset=1 << (bits - 1) if zero is None else 0)
    recipe = Recipe(codes=codes, values=values, zero=zero, scale=floats_of("scale"), group=grouping(parts, size))
    source.add(module, f"compressed-tensors {bits}-bit, {name_groups(size, n_in)}", (n_out, n_in), parts, recipe)


def _zero_points(bits: int, n_out: int) -> Reader:
    """Return the reader of zero points, packed along the rows, with the same offset as the codes."""
    return lambda parts, rows: codes_across(parts["zero"].array.T, bits, rows, n_out).astype(np.float32)


def _read_shape(source: Source, module: str) -> Shape:
    part = source.part(source.take(module, "weight_shape", ["I64", "I32"], (2,)))
    n_out, n_in = (int(size) for size in part.array)
    if n_out != source.shape(module, "weight_packed")[0] or n_in < 1:
        message = f"{part.name}: expected the rows of weight_packed and its columns, got {(n_out, n_in)}"
        raise source.error("Inconsistent", message)
    return n_out, n_in


def _scales(source: Source, module: str, weights: Fields, n_out: int, n_in: int) -> tuple[int, int, dict[str, str]]:
    """Return columns per scale, groups per row, and the names of the tensors of scales and column order by part."""
    strategy = weights.text("strategy")
    if strategy not in ("tensor", "channel", "group"):
        raise weights.error("Unsupported", "strategy", "'tensor', 'channel' or 'group'", strategy)
    size, groups = n_in, 1
    if strategy == "group":
        size, groups = n_groups(source, module, n_in, weights.integer("group_size"))
    shape = {"tensor": (1,), "channel": (n_out, 1), "group": (n_out, groups)}[strategy]
    parts = {"scale": source.take(module, "weight_scale", _FLOATS, shape, f"strategy {strategy}")}
    is_reordered = weights.values.get("actorder") in ("group", True)
    if is_reordered or source.has(module, "weight_g_idx"):
        parts["g_idx"] = source.take(module, "weight_g_idx", ["I32"], (n_in,), "actorder group")
    return size, groups, parts


def _add_int8(source: Source, module: str, weights: Fields) -> None:
    if weights.integer("num_bits") != 8 or not weights.boolean("symmetric", default=True):
        raise weights.error("Unsupported", "num_bits", "8 bits, symmetric", weights.values)
    n_out, n_in = source.shape(module, "weight")
    size, _, parts = _scales(source, module, weights, n_out, n_in)
    parts["weight"] = source.take(module, "weight", ["I8"])
    codes = Unpacker("weight", 8, (n_out, n_in))
    recipe = Recipe(codes=codes, values=INT8, scale=floats_of("scale"), group=grouping(parts, size))
    source.add(module, f"compressed-tensors int8, {name_groups(size, n_in)}", (n_out, n_in), parts, recipe)


def _add_float8(source: Source, module: str, weights: Fields) -> None:
    strategy = weights.text("strategy")
    if strategy == "block":
        add_blocks(source, module, "weight_scale", two_sizes(weights, "block_structure"), "block_structure")
    elif strategy == "tensor":
        add_scaled(source, module, "weight_scale", "FP8, one scale", lambda shape: [(1,), (), (1, 1)])
    elif strategy == "channel":
        add_scaled(source, module, "weight_scale", "FP8, one scale a row", lambda shape: [(shape[0], 1)])
    else:
        raise weights.error("Unsupported", "strategy", "'tensor', 'channel' or 'block'", strategy)


def _add_nvfp4(source: Source, module: str, weights: Fields) -> None:
    """Add a matrix of 4-bit floats with E4M3 scales for 16 columns, divided by a global scale."""
    n_out, half = source.shape(module, "weight_packed")
    parts = {
        "codes": source.take(module, "weight_packed", ["U8"]),
        "scale": source.take(module, "weight_scale", ["F8_E4M3"], (n_out, half // 8), "nvfp4-pack-quantized"),
        "global": source.take(module, "weight_global_scale", ["F32"], (1,)),
    }
    add_fp4(source, module, parts, floats_of("scale"), 16, "NVFP4", divisor=floats_of("global"))


def _add_mxfp4(source: Source, module: str, weights: Fields) -> None:
    n_out, half = source.shape(module, "weight_packed")
    parts = {
        "codes": source.take(module, "weight_packed", ["U8"]),
        "scale": source.take(module, "weight_scale", ["U8", "F8_E8M0"], (n_out, half // 16), "mxfp4-pack-quantized"),
    }
    add_fp4(source, module, parts, exponents_of("scale"), 32, "MXFP4")


def add_fp4(
    source: Source, module: str, parts: Mapping[str, str], scale: Reader, size: int, name: str,
    *, divisor: Reader | None = None,
) -> None:  # fmt: skip
    """Add a matrix of E2M1 codes, low nibble first, with a scale per `size` columns; a scale may be 0."""
    n_out, n_bytes = source.tensors[parts["codes"]].shape
    codes = Unpacker("codes", 4, (n_out, 2 * n_bytes))
    recipe = Recipe(codes=codes, values=E2M1, scale=scale, divisor=divisor, group=size, zero_scales=True)
    source.add(module, f"{name}, groups of {size}", codes.shape, parts, recipe)


_FORMATS = {
    "pack-quantized": _add_packed,
    "int-quantized": _add_int8,
    "float-quantized": _add_float8,
    "nvfp4-pack-quantized": _add_nvfp4,
    "mxfp4-pack-quantized": _add_mxfp4,
    "mxfp8-quantized": lambda source, module, weights: add_mx(source, module, "weight_scale"),
}
