"""GPTQ and AWQ: unsigned codes with a zero point for each group of columns.

    GPTQ        qweight (in * bits / 32, out) along the columns, qzeros (groups, out * bits / 32) along the rows,
                scales (groups, out), g_idx (in)
    AWQ gemm    qweight (in, out / 8) along the rows in AWQ's order, qzeros (groups, out / 8),
                scales (groups, out)
    AWQ gemv    qweight (out, in / 8), qzeros (out, words), scales (out, 8 * words)

The first version of GPTQ stores a zero point minus one, modulo 2^bits, the second version the zero point itself. The
words do not show the version, so the settings decide; a symmetric file that contradicts them raises an error.

Source: gptqmodel `qlinear/__init__.py` and `utils/model.py` (`convert_gptq_v1_to_v2_format_module`); AutoAWQ
`modules/linear/gemm.py`, `gemv.py` and `utils/packing_utils.py`.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from llorch.files.packed import Rows
from llorch.files.quantised.codes import awq, codes_across, integers, stream
from llorch.files.quantised.matrix import Parts, Reader, Recipe, StoredPart, Unpacker, floats_of, grouping, name_groups
from llorch.files.quantised.source import Source, matches_module, matches_part, n_groups, names_in, plain_path
from llorch.runtime.fields import Fields

_BITS = (2, 3, 4, 8)  # bits per code
_SCALES = ("F16", "BF16", "F32")  # dtypes of scales


def read_gptq(source: Source, *, default: str = "gptq") -> None:
    """Find the matrices of a GPTQ folder; `default` is its version if the settings have none."""
    settings = source.settings
    settings.refuse("pack_dtype", unless=("int32",), default="int32")
    key = "checkpoint_format" if settings.has("checkpoint_format") or not settings.has("format") else "format"
    version = settings.text(key, default=default)
    if version not in ("gptq", "gptq_v2"):
        raise settings.error("Unsupported", key, "'gptq' or 'gptq_v2'", version)
    for module in source.modules("qweight", "qzeros", "scales", "g_idx"):
        module_settings = _module_settings(source, module)
        if (bits := module_settings.integer("bits")) not in _BITS:
            raise settings.error("Unsupported", "bits", "2, 3, 4 or 8", bits)
        _add_gptq(source, module, module_settings, less_one=version == "gptq")
    _note_overrides(source)


def _module_settings(source: Source, module: str) -> Fields:
    """Return the settings of a module: the folder's settings with the module's overrides."""
    settings = source.settings
    overrides = {name: value for name, value in _find_overrides(source, module).items() if value is not None}
    return Fields({**settings.values, **overrides}, settings.path)


def _find_overrides(source: Source, module: str) -> Mapping[str, Any]:
    """Return the first match of a module in `dynamic` of gptqmodel or `extra_config` of AutoRound.

    In `extra_config` the name of the module, in any spelling, has priority over expressions; empty entries are ignored.
    """
    for key, matches in (("dynamic", re.match), ("extra_config", re.search)):
        section = source.settings.section(key)
        entries = {} if section is None else section.values
        if key == "extra_config":
            respelled = (values for name, values in entries.items() if plain_path(name) == plain_path(module))
            if isinstance(entry := entries.get(module, next(respelled, None)), Mapping):
                return entry
            entries = {name: values for name, values in entries.items() if values}
        for pattern, values in entries.items():
            try:
                is_match = matches(pattern.removeprefix("+:"), module)
            except re.error:
                raise source.settings.error("Malformed", key, "regular expressions", pattern) from None
            if is_match and not pattern.startswith("-:") and isinstance(values, Mapping):  # "-:" excludes a module
                return values
    return {}


def _note_overrides(source: Source) -> None:
    """Add notes for modules in `dynamic` or `extra_config` that the folder does not have."""
    for key in ("dynamic", "extra_config"):
        section = source.settings.section(key)
        names = [] if section is None else [name.removeprefix("+:") for name in section.values]
        source.note_unmatched(key, names, matches_module)


def _add_gptq(source: Source, module: str, settings: Fields, *, less_one: bool) -> None:
    bits, group_size = settings.integer("bits"), settings.integer("group_size")
    is_reordered, is_symmetric = settings.boolean("desc_act", default=False), settings.boolean("sym", default=True)
    n_words, n_out = source.shape(module, "qweight")
    n_in = n_words * 32 // bits
    if n_in * bits != n_words * 32 or n_out * bits % 32:
        message = f"{module}.qweight: expected whole words of {bits} bits (bits), got shape {(n_words, n_out)}"
        raise source.error("Inconsistent", message)
    size, groups = n_groups(source, module, n_in, group_size, partial=True)
    if is_reordered and not source.has(module, "g_idx"):
        raise source.error("Missing", f"{module}.g_idx: expected the group of each column (desc_act), got none")
    parts = {
        "qweight": source.take(module, "qweight", ["I32"]),
        "qzeros": source.take(module, "qzeros", ["I32"], (groups, n_out * bits // 32), f"bits {bits}"),
        "scales": source.take(module, "scales", _SCALES, (groups, n_out), f"group_size {group_size}"),
    }
    if source.has(module, "g_idx"):
        parts["g_idx"] = source.take(module, "g_idx", ["I32"], (n_in,), f"bits {bits}")

    zero = zero_points(bits, n_out, less_one=less_one)

    def check(parts: Parts) -> str | None:
        problem = _group_error(parts, size, reordered=is_reordered)
        if problem or not is_symmetric:
            return problem
        return _zero_point_error(zero(parts, slice(0, n_out)), 1 << (bits - 1), less_one=less_one, name=module)

    codes, group = Unpacker("qweight", bits, (n_out, n_in), "columns"), grouping(parts, size)
    recipe = Recipe(
        codes=codes, values=integers(bits), zero=zero, scale=_transposed_floats("scales"), group=group, check=check
    )
    source.add(module, f"GPTQ {bits}-bit, {name_groups(size, n_in)}", (n_out, n_in), parts, recipe)


def zero_points(bits: int, n_out: int, *, less_one: bool) -> Reader:
    """Return the reader of zero points, packed along the rows, with `less_one` stored minus one."""

    def read(parts: Parts, rows: Rows) -> np.ndarray:
        zero_codes = codes_across(parts["qzeros"].array, bits, rows, n_out)
        return ((zero_codes + less_one) & ((1 << bits) - 1)).astype(np.float32)

    return read


def _transposed_floats(part: str) -> Reader:
    """Return a reader of floats stored as (groups, rows)."""
    return lambda parts, rows: np.ascontiguousarray(parts[part].floats()[:, rows].T)


def _group_error(parts: Parts, size: int, *, reordered: bool) -> str | None:
    """Return the error of invalid column groups, None if they are valid; `reordered` columns have any order."""
    if "g_idx" not in parts:
        return None
    name, groups = parts["g_idx"].name, parts["g_idx"].array
    n_groups = parts["scales"].shape[0]
    if groups.min() < 0 or groups.max() >= n_groups:
        return f"{name}: expected groups from 0 to {n_groups - 1}, got {groups.min()} to {groups.max()}"
    if not reordered and not np.array_equal(groups, np.arange(groups.size) // size):
        return f"{name}: expected columns in order (desc_act is false), got another order"
    return None


def _zero_point_error(zeros: np.ndarray, expected: int, *, less_one: bool, name: str) -> str | None:
    """Return the error of a symmetric matrix whose zero points are not in the middle; None if they are."""
    different = zeros[zeros != expected]
    if not different.size:
        return None
    version, other_version, offset = ("gptq", "gptq_v2", 1) if less_one else ("gptq_v2", "gptq", -1)
    hint = f"; {other_version} would fit" if (zeros == expected + offset).all() else ""
    settings = f"sym and checkpoint_format {version}"
    return f"{name}.qzeros: {settings} ask for the zero point {expected} everywhere, got {different[0]:g}{hint}"


def read_awq(source: Source) -> None:
    """Find the matrices of an AWQ folder."""
    settings = source.settings
    settings.refuse("zero_point", unless=(True,), default=True)
    settings.refuse("bits" if settings.has("bits") or not settings.has("w_bit") else "w_bit", unless=(4,), default=4)
    key = "version" if settings.has("version") or not settings.has("format") else "format"
    version = settings.text(key, default="gemm").lower()
    if version not in ("gemm", "gemv"):
        raise settings.error("Unsupported", key, "'gemm' or 'gemv'", version)
    for module in source.modules("qweight", "qzeros", "scales"):
        module_settings = _module_settings(source, module)
        group_size = module_settings.integer("group_size" if module_settings.has("group_size") else "q_group_size")
        (_add_gemm if version == "gemm" else _add_gemv)(source, module, group_size)
    source.require_not_quantised("modules_to_not_convert", names_in(source, "modules_to_not_convert"), matches_part)
    _note_overrides(source)


def _padding_error(scales: StoredPart, groups: int) -> str | None:
    """Return the error of nonzero padding scales in a gemv matrix; AutoAWQ pads with zeros."""
    padding = scales.floats()[:, groups:]
    if not padding.any():
        return None
    return f"{scales.name}: expected 0 from column {groups} on (group_size), got {padding[padding != 0][0]:g}"


def _add_gemm(source: Source, module: str, group_size: int) -> None:
    """Add an AWQ matrix in the layout `gemm`: words of 8 output rows."""
    n_in, n_words = source.shape(module, "qweight")
    n_out = n_words * 8
    size, groups = n_groups(source, module, n_in, group_size)
    reason = f"version gemm, group_size {group_size}"
    parts = {
        "qweight": source.take(module, "qweight", ["I32"]),
        "qzeros": source.take(module, "qzeros", ["I32"], (groups, n_words), reason),
        "scales": source.take(module, "scales", _SCALES, (groups, n_out), reason),
    }
    recipe = Recipe(
        codes=Unpacker("qweight", 4, (n_out, n_in), "awq"),
        values=integers(4),
        zero=lambda parts, rows: awq(parts["qzeros"].array, rows, n_out).astype(np.float32),
        scale=_transposed_floats("scales"),
        group=size,
    )
    source.add(module, f"AWQ 4-bit, {name_groups(size, n_in)}", (n_out, n_in), parts, recipe)


def _add_gemv(source: Source, module: str, group_size: int) -> None:
    """Add an AWQ matrix in the layout `gemv`: words of 8 input columns, padded scales."""
    n_out, n_words = source.shape(module, "qweight")
    n_in = n_words * 8
    size, groups = n_groups(source, module, n_in, group_size)
    reason = f"version gemv, group_size {group_size}"
    words = source.shape(module, "qzeros")[1]
    if words * 8 < groups:
        raise source.error("Shape", f"{module}.qzeros: expected words for {groups} groups, got {words}; {reason}")
    parts = {
        "qweight": source.take(module, "qweight", ["I32"]),
        "qzeros": source.take(module, "qzeros", ["I32"], (n_out, words), reason),
        "scales": source.take(module, "scales", _SCALES, (n_out, 8 * words), reason),
    }
    scales = floats_of("scales")
    recipe = Recipe(
        codes=Unpacker("qweight", 4, (n_out, n_in)),
        values=integers(4),
        zero=lambda parts, rows: stream(parts["qzeros"].array[rows], 4, groups).astype(np.float32),
        scale=lambda parts, rows: scales(parts, rows)[:, :groups],
        group=size,
        check=lambda parts: _padding_error(parts["scales"], groups),
    )
    source.add(module, f"AWQ 4-bit (gemv), {name_groups(size, n_in)}", (n_out, n_in), parts, recipe)
