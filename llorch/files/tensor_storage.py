"""Layouts of weights that are not stored as one tensor in Hugging Face's order of rows and columns.

    gains        Hugging Face stores norm weights of Qwen3-Next and Qwen3.5 minus one, and the logarithm of decays
    delta nets   Qwen3-Next has one matrix for queries, keys, values and gates, head after head; GGUF files of Qwen3.5
                 have the value heads in another order: the heads that read one key head are not neighbours
    experts      one tensor per expert, or one for all, gate and up fused or not, transposed in Llama 4

A layout is data. Only this module undoes it, when a weight is read.

Source: llama.cpp conversion/qwen.py (`modify_tensors`, `_reorder_v_heads`) and conversion/llama.py; transformers
`modeling_qwen3_next.py` (`fix_query_key_value_ordering`), `modeling_llama4.py` (`Llama4TextExperts`).
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from llorch.families.layers import DeltaNet
from llorch.files.packed import Packed
from llorch.files.quant import GGMLType

Form = Literal["plain", "less_one", "logarithm"]


@dataclass(frozen=True, slots=True)
class TiledValues:
    """Value head order in which head t reads key head t % n_key_heads; Hugging Face groups them by key head."""

    net: DeltaNet
    width: int  # rows (or columns) per head
    n_leading: int = 0  # leading rows that are not reordered, such as queries and keys

    def index(self) -> np.ndarray:
        """Return the tensor's row index for each row of the weight."""
        n_keys = self.net.n_key_heads
        heads = np.arange(self.net.n_value_heads).reshape(-1, n_keys).T.reshape(-1, 1)
        rows = (heads * self.width + np.arange(self.width)).reshape(-1)
        return np.concatenate([np.arange(self.n_leading), self.n_leading + rows])


@dataclass(frozen=True, slots=True)
class FusedRows:
    """Fused rows: for each key head, the rows of all parts together."""

    n_heads: int
    widths: tuple[int, ...]  # rows of each part per head
    parts: tuple[int, ...]  # indices, in `widths`, of the parts that make up the weight

    def index(self) -> np.ndarray:
        """Return the tensor's row index for each row of the weight: part by part, the rows of all heads."""
        starts = np.concatenate([[0], np.cumsum(self.widths)])
        heads = np.arange(self.n_heads)[:, None] * starts[-1]
        return np.concatenate([(heads + np.arange(starts[part], starts[part + 1])).reshape(-1) for part in self.parts])


@dataclass(frozen=True, slots=True)
class Layout:
    """Position of a weight in a file's tensor, and the transformation of its values."""

    shape: tuple[int, ...] | None = None  # shape of the tensor, if it differs from the weight's
    rows: TiledValues | FusedRows | None = None
    columns: TiledValues | None = None
    half: int | None = None  # gate (0) or up (1) of a fused tensor
    is_transposed: bool = False  # the tensor is (experts, in, out)
    form: Form = "plain"

    def extract(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Extract a weight of the given shape from a tensor, in the order of Hugging Face."""
        array = array.swapaxes(-1, -2) if self.is_transposed else array
        if self.half is not None:
            array = np.split(array, 2, axis=-2)[self.half]
        array = array if self.rows is None else array[self.rows.index()]
        array = array if self.columns is None else array[:, self.columns.index()]
        return array.reshape(shape)

    def compute(self, array: np.ndarray, dtype: type[np.floating]) -> np.ndarray:
        """Compute the model's values from the stored ones, rounded once."""
        match self.form:
            case "plain":
                return array.astype(dtype, copy=False)
            case "less_one":
                return (array.astype(np.float64) + 1).astype(dtype)
            case "logarithm":
                with np.errstate(over="ignore"):
                    return (-np.exp(array.astype(np.float64))).astype(dtype)

    def put(self, array: np.ndarray, tensor: np.ndarray) -> None:
        """Write a weight into its position of a float32 tensor: the inverse of `extract` and `compute`."""
        target = tensor.swapaxes(-1, -2) if self.is_transposed else tensor
        if self.half is not None:
            target = np.split(target, 2, axis=-2)[self.half]
        array = self._to_stored(array)
        if self.rows is not None:
            target[self.rows.index()] = array.reshape(len(array), *target.shape[1:])
        elif self.columns is not None:
            target[:, self.columns.index()] = array
        else:
            target[...] = array.reshape(target.shape)

    def _to_stored(self, array: np.ndarray) -> np.ndarray:
        """Return the float32 values to store, from which `compute` restores `array`, exactly if possible."""
        match self.form:
            case "plain":
                return array
            case "less_one":
                return (array.astype(np.float64) - 1).astype(np.float32)
            case "logarithm":
                near = np.log(-array.astype(np.float64)).astype(np.float32)
                candidates = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
                return np.select([self.compute(x, np.float32) == array for x in candidates], candidates, near)


AS_IS = Layout()  # one tensor in Hugging Face's order


def select_expert(stack: Packed, layout: Layout, number: int) -> Packed:
    """Return one expert of a tensor of all experts, (out, in); a transposed expert is copied."""
    _, *shape = stack.shape
    expert = replace(stack, raw=stack.raw.reshape(stack.shape[0], -1)[number], shape=tuple(shape))
    if layout.is_transposed:
        expert = _transposed_packed(expert)
    if layout.half is None:
        return expert
    rows = expert.shape[0] // 2
    return expert.picked(slice(layout.half * rows, (layout.half + 1) * rows))


def _transposed_packed(matrix: Packed) -> Packed:
    assert matrix.ggml_type in (GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.F64)  # blocks cannot be transposed
    n_in, n_out = matrix.shape
    elements = matrix.raw.reshape(n_in, n_out, -1)
    return replace(matrix, raw=np.ascontiguousarray(elements.swapaxes(0, 1)).reshape(-1), shape=(n_out, n_in))


def rows_of(matrix: Packed, layout: Layout) -> Packed:
    """Select the rows of a weight, in the order of Hugging Face; the column order does not change."""
    return matrix if layout.rows is None else matrix.picked(layout.rows.index())


def in_gguf(short: str, net: DeltaNet, hidden_size: int, *, tiled: bool) -> Layout:
    """Return the layout of a delta net's weight in a GGUF file; Qwen3.5 has `tiled` value heads."""
    if not tiled:
        return fused_layout(short, net, hidden_size) if short in ("in_b", "in_a") else AS_IS
    if net.n_key_heads == net.n_value_heads:  # both orders are equal
        return AS_IS
    match short:
        case "in_qkv" | "conv":
            return Layout(rows=TiledValues(net, net.value_head_dim, 2 * net.key_width))
        case "in_z":
            return Layout(rows=TiledValues(net, net.value_head_dim))
        case "in_b" | "in_a" | "dt_bias" | "decay":
            return Layout(rows=TiledValues(net, 1))
        case "out_proj":
            return Layout(columns=TiledValues(net, net.value_head_dim))
        case _:
            return AS_IS


def fused_layout(short: str, net: DeltaNet, hidden_size: int) -> Layout:
    """Return the layout of a weight in the two fused matrices of Qwen3-Next in a Hugging Face folder."""
    n_values_per_key = net.n_value_heads // net.n_key_heads
    if short in ("in_qkv", "in_z"):
        v_rows = n_values_per_key * net.value_head_dim
        widths, parts = ((net.key_head_dim, net.key_head_dim, v_rows, v_rows), (0, 1, 2) if short == "in_qkv" else (3,))
    else:
        widths, parts = (n_values_per_key, n_values_per_key), (0,) if short == "in_b" else (1,)  # else in_a
    return Layout(shape=(net.n_key_heads * sum(widths), hidden_size), rows=FusedRows(net.n_key_heads, widths, parts))
