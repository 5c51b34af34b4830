"""How a file holds a weight, where that is not as one tensor of its own in the order of Hugging Face.

    gains        Hugging Face stores those of Qwen3-Next and Qwen3.5 less one, and the logarithm of what states decay by
    delta nets   Qwen3-Next has one matrix for queries, keys, values and gates, head after head; GGUF files of Qwen3.5
                 have the value heads in another order: those that read the first key head are not neighbours
    experts      one tensor for each, or one for all, gate and up joined or not, in Llama 4 turned over

A layout is data; what it says is undone when a weight is read, here and nowhere else.

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
    """Value heads lie so that head t reads key head t % n_key_heads; Hugging Face has those of a key head together."""

    net: DeltaNet
    width: int  # rows of a head
    before: int = 0  # rows before them that are not reordered

    def index(self) -> np.ndarray:
        """Return the row of the tensor for each row of the weight."""
        n_keys = self.net.n_key_heads
        heads = np.arange(self.net.n_value_heads).reshape(-1, n_keys).T.reshape(-1, 1)
        rows = (heads * self.width + np.arange(self.width)).reshape(-1)
        return np.concatenate([np.arange(self.before), self.before + rows])


@dataclass(frozen=True, slots=True)
class Joined:
    """Parts of every key head lie together, one head after the other."""

    n_heads: int
    widths: tuple[int, ...]  # rows that each part has of a head
    parts: tuple[int, ...]  # those that the weight is made of

    def index(self) -> np.ndarray:
        """Return the row of the tensor for each row of the weight: part by part, the rows of all heads."""
        starts = np.concatenate([[0], np.cumsum(self.widths)])
        heads = np.arange(self.n_heads)[:, None] * starts[-1]
        return np.concatenate([(heads + np.arange(starts[i], starts[i + 1])).reshape(-1) for i in self.parts])


@dataclass(frozen=True, slots=True)
class Layout:
    """Where in a file's tensor a weight lies, and what is done to its numbers."""

    shape: tuple[int, ...] | None = None  # of the tensor, if it is not that of the weight
    rows: TiledValues | Joined | None = None
    columns: TiledValues | None = None
    half: int | None = None  # gate (0) or up (1) of a tensor that has both
    turned: bool = False  # the tensor is (experts, in, out)
    form: Form = "plain"

    def taken(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Take the numbers of a weight of some shape out of a tensor, in the order of Hugging Face."""
        array = array.swapaxes(-1, -2) if self.turned else array
        if self.half is not None:
            array = np.split(array, 2, axis=-2)[self.half]
        array = array if self.rows is None else array[self.rows.index()]
        array = array if self.columns is None else array[:, self.columns.index()]
        return array.reshape(shape)

    def made(self, array: np.ndarray, dtype: type[np.floating]) -> np.ndarray:
        """Make the numbers that the model computes with, rounded once."""
        match self.form:
            case "plain":
                return array.astype(dtype, copy=False)
            case "less_one":
                return (array.astype(np.float64) + 1).astype(dtype)
            case "logarithm":
                with np.errstate(over="ignore"):
                    return (-np.exp(array.astype(np.float64))).astype(dtype)

    def put(self, array: np.ndarray, tensor: np.ndarray) -> None:
        """Write a weight where it lies in a float32 tensor: the reverse of `taken` and `made`."""
        part = tensor.swapaxes(-1, -2) if self.turned else tensor
        if self.half is not None:
            part = np.split(part, 2, axis=-2)[self.half]
        array = self._unmade(array)
        if self.rows is not None:
            part[self.rows.index()] = array.reshape(len(array), *part.shape[1:])
        elif self.columns is not None:
            part[:, self.columns.index()] = array
        else:
            part[...] = array.reshape(part.shape)

    def _unmade(self, array: np.ndarray) -> np.ndarray:
        """Return the float32 numbers to store, from which `made` computes the given ones exactly if it can."""
        match self.form:
            case "plain":
                return array
            case "less_one":
                return (array.astype(np.float64) - 1).astype(np.float32)
            case "logarithm":
                near = np.log(-array.astype(np.float64)).astype(np.float32)
                around = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
                return np.select([self.made(one, np.float32) == array for one in around], around, near)


AS_IS = Layout()


def expert_of(stack: Packed, layout: Layout, number: int) -> Packed:
    """Return one expert of a tensor of all experts, (out, in); its bytes are copied only if they are turned."""
    _, *shape = stack.shape
    one = replace(stack, raw=stack.raw.reshape(stack.shape[0], -1)[number], shape=tuple(shape))
    if layout.turned:
        one = _transposed_packed(one)
    if layout.half is None:
        return one
    rows = one.shape[0] // 2
    return one.picked(slice(layout.half * rows, (layout.half + 1) * rows))


def _transposed_packed(matrix: Packed) -> Packed:
    assert matrix.ggml_type in (GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.F64)
    n_in, n_out = matrix.shape
    elements = matrix.raw.reshape(n_in, n_out, -1)
    return replace(matrix, raw=np.ascontiguousarray(elements.swapaxes(0, 1)).reshape(-1), shape=(n_out, n_in))


def rows_of(matrix: Packed, layout: Layout) -> Packed:
    """Pick the rows of a weight, in the order of Hugging Face; its columns stay as they are."""
    return matrix if layout.rows is None else matrix.picked(layout.rows.index())


def in_gguf(short: str, net: DeltaNet, hidden_size: int, *, tiled: bool) -> Layout:
    """Return the layout of a delta net's weight in a GGUF file: `tiled` value heads are those of Qwen3.5."""
    if not tiled:
        return joined_layout(short, net, hidden_size) if short in ("in_b", "in_a") else AS_IS
    if net.n_key_heads == net.n_value_heads:
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


def joined_layout(short: str, net: DeltaNet, hidden_size: int) -> Layout:
    """Return the layout of a weight in the two matrices that Qwen3-Next has in a Hugging Face folder."""
    group = net.n_value_heads // net.n_key_heads
    if short in ("in_qkv", "in_z"):
        wide = group * net.value_head_dim
        widths, parts = (net.key_head_dim, net.key_head_dim, wide, wide), (0, 1, 2) if short == "in_qkv" else (3,)
    else:
        widths, parts = (group, group), (0,) if short == "in_b" else (1,)
    return Layout(shape=(net.n_key_heads * sum(widths), hidden_size), rows=Joined(net.n_key_heads, widths, parts))
