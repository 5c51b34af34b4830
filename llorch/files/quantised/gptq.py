"""GPTQ and AWQ: unsigned codes with a zero point for each group of columns.

    GPTQ        qweight (in * bits / 32, out) along the columns, qzeros (groups, out * bits / 32) along the rows,
                scales (groups, out), g_idx (in)
    AWQ gemm    qweight (in, out / 8) along the rows in an order of its own, qzeros (groups, out / 8),
                scales (groups, out)
    AWQ gemv    qweight (out, in / 8), qzeros (out, words), scales (out, 8 * words)

A file of the first version of GPTQ stores a zero point less one, modulo 2^bits. The second version stores it as it is.
The words of both versions look alike, so the settings decide; where a symmetric file contradicts them, it is refused.

Source: gptqmodel `qlinear/__init__.py` and `utils/model.py` (`convert_gptq_v1_to_v2_format_module`); AutoAWQ
`modules/linear/gemm.py`, `gemv.py` and `utils/packing_utils.py`.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from llorch.files.packed import Rows
from llorch.files.quantised.codes import across, awq, integers, stream
from llorch.files.quantised.matrix import CodesOf, Parts, Reader, Recipe, StoredPart, columns_of, floats_of, name_groups
from llorch.files.quantised.source import Source, matches_module, matches_part, n_groups, names_in, plain_path
from llorch.runtime.fields import Fields

_BITS = (2, 3, 4, 8)
_SCALES = ("F16", "BF16", "F32")


def read_gptq(source: Source, *, default: str = "gptq") -> None:
    """Find the matrices of a GPTQ folder; `default` is its version if the settings have none."""
    settings = source.settings
    settings.refuse("pack_dtype", unless=("int32",), default="int32")
    key = "checkpoint_format" if settings.has("checkpoint_format") or not settings.has("format") else "format"
    version = settings.text(key, default=default)
    if version not in ("gptq", "gptq_v2"):
        raise settings.error("Unsupported", key, "'gptq' or 'gptq_v2'", version)
    for module in source.modules("qweight", "qzeros", "scales", "g_idx"):
        own = _of_module(source, module)
        if (bits := own.integer("bits")) not in _BITS:
            raise settings.error("Unsupported", "bits", "2, 3, 4 or 8", bits)
        _add_gptq(source, module, own, less_one=version == "gptq")
    _note_overrides(source)


def _of_module(source: Source, module: str) -> Fields:
    """Return the settings of a module: those of the folder, with the module's own in their places."""
    settings = source.settings
    own = {name: value for name, value in _own_settings(source, module).items() if value is not None}
    return Fields({**settings.values, **own}, settings.path)


def _own_settings(source: Source, module: str) -> Mapping[str, Any]:
    """Find a module in `dynamic` of gptqmodel or `extra_config` of AutoRound; the first that matches is meant.

    In `extra_config` the name of the module, in any spelling, goes before expressions; empty ones are passed over.
    """
    for key, matches in (("dynamic", re.match), ("extra_config", re.search)):
        section = source.settings.section(key)
        given = {} if section is None else section.values
        if key == "extra_config":
            spelled = (values for name, values in given.items() if plain_path(name) == plain_path(module))
            if isinstance(named := given.get(module, next(spelled, None)), Mapping):
                return named
            given = {name: values for name, values in given.items() if values}
        for pattern, values in given.items():
            try:
                matched = matches(pattern.removeprefix("+:"), module)
            except re.error:
                raise source.settings.error("Malformed", key, "regular expressions", pattern) from None
            if matched and not pattern.startswith("-:") and isinstance(values, Mapping):
                return values
    return {}


def _note_overrides(source: Source) -> None:
    """Note modules that `dynamic` or `extra_config` names and the folder does not have."""
    for key in ("dynamic", "extra_config"):
        section = source.settings.section(key)
        names = [] if section is None else [name.removeprefix("+:") for name in section.values]
        source.note_unmatched(key, names, matches_module)


def _add_gptq(source: Source, module: str, own: Fields, *, less_one: bool) -> None:
    bits, group_size = own.integer("bits"), own.integer("group_size")
    ordered, symmetric = own.boolean("desc_act", default=False), own.boolean("sym", default=True)
    n_words, n_out = source.shape(module, "qweight")
    n_in = n_words * 32 // bits
    if n_in * bits != n_words * 32 or n_out * bits % 32:
        message = f"{module}.qweight: expected whole words of {bits} bits (bits), got shape {(n_words, n_out)}"
        raise source.error("Inconsistent", message)
    size, groups = n_groups(source, module, n_in, group_size, partial=True)
    if ordered and not source.has(module, "g_idx"):
        raise source.error("Missing", f"{module}.g_idx: expected the group of each column (desc_act), got none")
    parts = {
        "qweight": source.take(module, "qweight", ["I32"]),
        "qzeros": source.take(module, "qzeros", ["I32"], (groups, n_out * bits // 32), f"bits {bits}"),
        "scales": source.take(module, "scales", _SCALES, (groups, n_out), f"group_size {group_size}"),
    }
    if source.has(module, "g_idx"):
        parts["g_idx"] = source.take(module, "g_idx", ["I32"], (n_in,), f"bits {bits}")

    zero = _zero_points(bits, n_out, less_one=less_one)

    def check(parts: Parts) -> str | None:
        wrong = _wrong_groups(parts, size, ordered=ordered)
        if wrong or not symmetric:
            return wrong
        return _wrong_zero(zero(parts, slice(0, n_out)), 1 << (bits - 1), less_one=less_one, name=module)

    codes, group = CodesOf("qweight", bits, (n_out, n_in), "columns"), columns_of(parts, size)
    recipe = Recipe(codes=codes, values=integers(bits), zero=zero, scale=_turned("scales"), group=group, check=check)
    source.add(module, f"GPTQ {bits}-bit, {name_groups(size, n_in)}", (n_out, n_in), parts, recipe)


def _zero_points(bits: int, n_out: int, *, less_one: bool) -> Reader:
    """Read zero points, which are packed along the rows, stored as they are or `less_one`."""

    def read(parts: Parts, rows: Rows) -> np.ndarray:
        stored = across(parts["qzeros"].array, bits, rows, n_out)
        return ((stored + less_one) & ((1 << bits) - 1)).astype(np.float32)

    return read


def _turned(part: str) -> Reader:
    """Read floats of a part (groups, rows)."""
    return lambda parts, rows: np.ascontiguousarray(parts[part].floats()[:, rows].T)


def _wrong_groups(parts: Parts, size: int, *, ordered: bool) -> str | None:
    """Say why the groups of the columns cannot be meant."""
    if "g_idx" not in parts:
        return None
    name, groups = parts["g_idx"].name, parts["g_idx"].array
    n_groups = parts["scales"].shape[0]
    if groups.min() < 0 or groups.max() >= n_groups:
        return f"{name}: expected groups from 0 to {n_groups - 1}, got {groups.min()} to {groups.max()}"
    if not ordered and not np.array_equal(groups, np.arange(groups.size) // size):
        return f"{name}: expected columns in order (desc_act is false), got another order"
    return None


def _wrong_zero(zeros: np.ndarray, wanted: int, *, less_one: bool, name: str) -> str | None:
    """Say that the zero points of a symmetric matrix are not in the middle, and which version would fit."""
    wrong = zeros[zeros != wanted]
    if not wrong.size:
        return None
    version, other, off = ("gptq", "gptq_v2", 1) if less_one else ("gptq_v2", "gptq", -1)
    fits = f"; {other} would fit" if (zeros == wanted + off).all() else ""
    settings = f"sym and checkpoint_format {version}"
    return f"{name}.qzeros: {settings} ask for the zero point {wanted} everywhere, got {wrong[0]:g}{fits}"


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
        own = _of_module(source, module)
        group_size = own.integer("group_size" if own.has("group_size") else "q_group_size")
        (_add_gemm if version == "gemm" else _add_gemv)(source, module, group_size)
    source.require_left_alone("modules_to_not_convert", names_in(source, "modules_to_not_convert"), matches_part)
    _note_overrides(source)


def _wrong_padding(scales: StoredPart, groups: int) -> str | None:
    """Say that a gemv matrix has scales of more groups than its settings give; AutoAWQ fills the rest with zeros."""
    wrong = scales.floats()[:, groups:]
    if not wrong.any():
        return None
    return f"{scales.name}: expected 0 from column {groups} on (group_size), got {wrong[wrong != 0][0]:g}"


def _add_gemm(source: Source, module: str, group_size: int) -> None:
    """Add an AWQ matrix in the layout `gemm`: words of 8 output rows."""
    n_in, n_words = source.shape(module, "qweight")
    n_out = n_words * 8
    size, groups = n_groups(source, module, n_in, group_size)
    said = f"version gemm, group_size {group_size}"
    parts = {
        "qweight": source.take(module, "qweight", ["I32"]),
        "qzeros": source.take(module, "qzeros", ["I32"], (groups, n_words), said),
        "scales": source.take(module, "scales", _SCALES, (groups, n_out), said),
    }
    recipe = Recipe(
        codes=CodesOf("qweight", 4, (n_out, n_in), "awq"),
        values=integers(4),
        zero=lambda parts, rows: awq(parts["qzeros"].array, rows, n_out).astype(np.float32),
        scale=_turned("scales"),
        group=size,
    )
    source.add(module, f"AWQ 4-bit, {name_groups(size, n_in)}", (n_out, n_in), parts, recipe)


def _add_gemv(source: Source, module: str, group_size: int) -> None:
    """Add an AWQ matrix in the layout `gemv`: words of 8 input columns, padded scales."""
    n_out, n_words = source.shape(module, "qweight")
    n_in = n_words * 8
    size, groups = n_groups(source, module, n_in, group_size)
    said = f"version gemv, group_size {group_size}"
    words = source.shape(module, "qzeros")[1]
    if words * 8 < groups:
        raise source.error("Shape", f"{module}.qzeros: expected words for {groups} groups, got {words}; {said}")
    parts = {
        "qweight": source.take(module, "qweight", ["I32"]),
        "qzeros": source.take(module, "qzeros", ["I32"], (n_out, words), said),
        "scales": source.take(module, "scales", _SCALES, (n_out, 8 * words), said),
    }
    scales = floats_of("scales")
    recipe = Recipe(
        codes=CodesOf("qweight", 4, (n_out, n_in)),
        values=integers(4),
        zero=lambda parts, rows: stream(parts["qzeros"].array[rows], 4, groups).astype(np.float32),
        scale=lambda parts, rows: scales(parts, rows)[:, :groups],
        group=size,
        check=lambda parts: _wrong_padding(parts["scales"], groups),
    )
    source.add(module, f"AWQ 4-bit (gemv), {name_groups(size, n_in)}", (n_out, n_in), parts, recipe)
