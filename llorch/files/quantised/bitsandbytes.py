"""bitsandbytes: blocks of 64 elements across consecutive rows (NF4, FP4), or signed bytes with one scale per row.

The file has the table of the 16 values. A byte has two codes, high nibble first. With double quantisation the scale of
a block is a code:

    absmax[i] = nested_quant_map[code[i]] * nested_absmax[i // 256] + nested_offset

Source: bitsandbytes `functional.py` (`dequantize_4bit`, `QuantState.from_dict`) and `nn/modules.py` (`Int8Params`).
"""

from dataclasses import dataclass
from math import gcd, prod

import numpy as np

from llorch.files.packed import Rows
from llorch.files.quantised.codes import INT8
from llorch.files.quantised.float8 import add_scaled
from llorch.files.quantised.matrix import Parts, Recipe, Unpacker
from llorch.files.quantised.source import Shape, Source, matches_part, names_in, two_sizes
from llorch.files.strict_json import parse_json
from llorch.runtime.fields import Fields

_STATE = "quant_state.bitsandbytes__"  # start of the suffix of a JSON tensor: settings of one matrix
_INT8_SCALE = np.float32(7.874015718698502e-3)  # 1 / 127, as the library rounds it


def read_bitsandbytes(source: Source) -> None:
    """Find the matrices of a bitsandbytes folder."""
    default = source.settings.text("bnb_4bit_quant_type", default="nf4")
    four_bit = (f"weight.{_STATE}nf4", f"weight.{_STATE}fp4", "weight.absmax", "weight.quant_map")
    for module in source.modules(*four_bit, dtypes=["U8"]):
        kinds = (kind for kind in ("nf4", "fp4") if source.has(module, f"weight.{_STATE}{kind}"))
        _add_four_bit(source, module, next(kinds, default))
    for module in source.modules("SCB", dtypes=["I8"]):
        _add_int8(source, module)
    source.require_not_quantised("llm_int8_skip_modules", names_in(source, "llm_int8_skip_modules"), matches_part)
    source.leave_out("weight_format")


def _add_int8(source: Source, module: str) -> None:
    add_scaled(
        source, module, "SCB", "bitsandbytes int8, one scale a row", lambda shape: [(shape[0],)],
        values=INT8, dtype="I8", factor=_INT8_SCALE
    )  # fmt: skip


def _add_four_bit(source: Source, module: str, kind: str) -> None:
    """Add a matrix of NF4 or FP4 codes; its block scales may be quantised, too."""
    declared = source.settings.text("bnb_4bit_quant_type", default=kind)
    if declared != kind:
        raise source.settings.error("Inconsistent", "bnb_4bit_quant_type", f"{kind!r}, as {module} has it", declared)
    state = _state(source, source.take(module, f"weight.{_STATE}{kind}", ["U8"]))
    shape, size = two_sizes(state, "shape", "rows and columns"), state.integer("blocksize", low=1)
    n_blocks = -(-prod(shape) // size)
    parts = {
        "codes": source.take(module, "weight", ["U8"], ((prod(shape) + 1) // 2, 1)),
        "values": source.take(module, "weight.quant_map", ["F32"], (16,)),
        "absmax": source.take(module, "weight.absmax", ["U8", "F32"], (n_blocks,)),
    }
    scale, name = BlockScales(shape, size), f"{kind.upper()}, blocks of {size}"
    if source.tensors[parts["absmax"]].dtype == "U8":
        nested_size = state.integer("nested_blocksize", low=1)
        n_nested = -(-n_blocks // nested_size)
        parts["nested_absmax"] = source.take(module, "weight.nested_absmax", ["F32"], (n_nested,))
        parts["nested_values"] = source.take(module, "weight.nested_quant_map", ["F32"], (256,))
        scale = BlockScales(shape, size, nested_size, np.float32(state.number("nested_offset")))
        name += ", double quantised"
    source.unused.add(f"{module}.weight.{_STATE}{kind}")
    codes, group = Unpacker("codes", 4, shape, "high first"), gcd(size, shape[1])
    recipe = Recipe(
        codes=codes, values=lambda parts: parts["values"].floats(), scale=scale, group=group, zero_scales=True
    )
    source.add(module, name, shape, parts, recipe)


def _state(source: Source, name: str) -> Fields:
    values = parse_json(source.part(name).raw.tobytes(), what=name, path=source.settings.path)
    if not isinstance(values, dict):
        raise source.error("Malformed", f"{name}: expected a JSON object, got {type(values).__name__}")
    return Fields(values, source.settings.path)


@dataclass(frozen=True, slots=True)
class BlockScales:
    """Reader of the scale of each group of columns: a float per block, or with `nested_size` a quantised scale.

    A block may start inside a row. So a group has gcd(`size`, columns) columns: every group lies in one block.
    """

    shape: Shape
    size: int
    nested_size: int | None = None
    offset: np.float32 | None = None

    def __call__(self, parts: Parts, rows: Rows, /) -> np.ndarray:
        """Read the scales of some rows, (rows, groups)."""
        group = gcd(self.size, self.shape[1])
        n_groups = self.shape[1] // group
        ids = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        blocks = (ids[:, None] * n_groups + np.arange(n_groups)) * group // self.size
        codes = parts["absmax"].array[blocks]
        if self.nested_size is None:
            return codes
        scale = parts["nested_values"].floats()[codes] * parts["nested_absmax"].floats()[blocks // self.nested_size]
        return scale if self.offset is None else scale + self.offset
