"""Weights of a file or folder put into the torch model, one tensor at a time.

The paths of weights in the torch modules are as in transformers, but experts are one stack and decays are made.

A product with a packed matrix reads all of its bytes, one after the other. In pages of 4 kB the processor looks up the
place of a page for every 64 lines that it fetches, and fetches no line ahead beyond a page. `LargePages` are pages of
2 MB, which Linux gives to memory that asks for them. Source: madvise(2), MADV_HUGEPAGE.
"""

import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from llorch.families.config import ModelConfig
from llorch.files import Weights
from llorch.files.mapped import release_pages
from llorch.files.packed import Packed
from llorch.files.quant import GGMLType
from llorch.files.quantised.matrix import QuantisedMatrix
from llorch.files.tensor_names import LAYER_WEIGHTS, MODEL_WEIGHTS, Weight, inventory, prefixes_of
from llorch.files.tensor_storage import AS_IS, rows_of
from llorch.pytorch.causal_lm import CausalLM, widened
from llorch.pytorch.kernels.packing import HALF_TYPES, Fields, Kind, Table, has_finite_numbers, shorten
from llorch.pytorch.kernels.quantised_linear import QuantisedEmbedding, QuantisedLinear, Reordered
from llorch.pytorch.models.experts import QuantisedExperts
from llorch.pytorch.models.families import build
from llorch.pytorch.stored_kinds import group_order, in_group_order, kind_of, pack_file_blocks, pack_stored, stays_half
from llorch.runtime.memory import return_freed_memory

_WORDS = {"mlp": "mlp", "router": "gate", "e": ""}
PATHS = {row.name: row.huggingface.format(**_WORDS).replace("..", ".") for row in (*MODEL_WEIGHTS, *LAYER_WEIGHTS)}
PATHS["decay"] = "linear_attn.decay"


def path_of(name: str) -> str:
    """Return the attribute path of a weight, given its canonical name."""
    *layer, short = name.split(".")
    return (prefixes_of(int(layer[1]))[2] if layer else "") + PATHS[short]


_CHUNK = 1 << 26  # bytes that are mapped at once; those that nothing was copied to take no memory
_LEAST = 1 << 14  # bytes of a tensor that is worth a copy
_LINE = 64  # bytes of a line of the processor's cache


class LargePages:
    """Memory for the weights of one model. It is freed with this object and the last tensor that lies in it."""

    def __init__(self) -> None:
        """Start without memory."""
        self._chunks: list[tuple[int, mmap.mmap]] = []  # address, memory
        self._taken = 0  # bytes of the last chunk

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Make a tensor of the CPU, still to be written; in ordinary memory if it is small or there are no pages."""
        room = self._room(torch.Size(shape), dtype)
        return torch.empty(shape, dtype=dtype) if room is None else room

    def copied(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors of the CPU into large pages; small ones stay, and those of `empty`, and all without pages."""
        return {name: self._copied(field) for name, field in fields.items()}

    def _copied(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu" or self._holds(tensor):
            return tensor
        room = self._room(tensor.shape, tensor.dtype)
        return tensor if room is None else room.copy_(tensor)

    def _holds(self, tensor: Tensor) -> bool:
        return any(address <= tensor.data_ptr() < address + len(chunk) for address, chunk in self._chunks)

    def _room(self, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Take memory for a tensor; None for a small one, or where the system has no large pages or no memory."""
        size = shape.numel() * dtype.itemsize
        if size < _LEAST or not self._has_room(size):
            return None
        start, self._taken = self._taken, self._taken + -(-size // _LINE) * _LINE
        return torch.frombuffer(self._chunks[-1][1], dtype=dtype, count=shape.numel(), offset=start).view(shape)

    def _has_room(self, size: int) -> bool:
        """Map another chunk if the last one is too full; False where that fails."""
        if self._chunks and self._taken + size <= len(self._chunks[-1][1]):
            return True
        try:
            chunk = mmap.mmap(-1, max(size, _CHUNK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            chunk.madvise(mmap.MADV_HUGEPAGE)
        except (AttributeError, OSError):
            return False
        self._chunks.append((torch.frombuffer(chunk, dtype=torch.uint8).data_ptr(), chunk))
        self._taken = 0
        return True


BETWEEN_RETURNS = 1 << 25  # bytes that are read before freed memory is returned to the system

Cut = Callable[[str, torch.Tensor], torch.Tensor]  # what is kept of a weight, or of a field of a packed one


def all_of(path: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor unchanged, for a process that has the whole model."""
    return tensor


def load_dense(weights: Weights, *, dtype: torch.dtype, device: torch.device, cut: Cut = all_of) -> CausalLM:
    """Build the model of frozen weights in one dtype, each whole only until `cut`; NaN and infinity are refused."""
    model = _empty(weights.config)
    for row in _in_turn(weights):
        _put_dense(model, weights, row, dtype, device, cut)
    return completed(model)


def load_packed(weights: Weights, *, dtype: torch.dtype, device: torch.device, cut: Cut = all_of) -> CausalLM:
    """Load a model as `load_dense` does, but keep what has a packed kind packed, and what `stays_half` in 16 bits."""
    model, pages = _empty(weights.config), LargePages()
    for row in _in_turn(weights):
        kind = _kept_kind(weights, row, dtype, device, cut)
        if kind is not None:
            _put_packed(model, weights, row, kind, dtype, device, cut, pages)
        else:
            _put_dense(model, weights, row, dtype, device, cut)
    return completed(model)


def completed(model: CausalLM) -> CausalLM:
    """Share a tied embedding with the output matrix, and leave the mode of training."""
    if model.config.tie_word_embeddings:
        embedding = model.model.embed_tokens
        if isinstance(embedding, QuantisedEmbedding):
            model.lm_head = QuantisedLinear(embedding.fields, embedding.ggml_type)
        else:
            model.lm_head.weight = embedding.weight
    return model.eval()


def _in_turn(weights: Weights) -> Iterator[Weight]:
    """Yield each weight to be loaded; return its pages of the file afterwards, and freed memory now and then."""
    n_read = 0
    for row in inventory(weights.config).values():
        yield row
        weights.search_zeros(row.name)
        for stored in weights.all_stored(row.name):
            release_pages(stored.raw)
            n_read += stored.n_bytes
        if n_read > BETWEEN_RETURNS:
            return_freed_memory()
            n_read = 0
    return_freed_memory()


def _kept_kind(weights: Weights, row: Weight, dtype: torch.dtype, device: torch.device, cut: Cut) -> Kind | None:
    if not row.is_matrix:
        return None
    stored = weights.stored_type(row.name)
    if isinstance(stored, GGMLType) and len(row.shape) == 2:
        columns = cut(path_of(row.name), torch.empty(row.shape, device="meta")).shape[1]
        if stays_half(weights, row.name, columns, dtype, device):
            return stored
    return kind_of(weights, row.name)


def put(model: nn.Module, path: str, tensor: torch.Tensor) -> None:
    """Set a frozen parameter by its attribute path, or a buffer, which is at least float32."""
    name, owner = path.rpartition(".")[2], model.get_submodule(path.rpartition(".")[0])
    setattr(owner, name, widened(tensor) if name in owner._buffers else nn.Parameter(tensor, requires_grad=False))


class _NoInitialValues(TorchFunctionMode):
    """Parameters stay as they are made; for those without memory, torch would import its compiler to draw numbers."""

    def __torch_function__(
        self, func: Callable, types: Sequence, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def _empty(config: ModelConfig) -> CausalLM:
    """Build the modules with parameters that take no memory."""
    with torch.device("meta"), _NoInitialValues():
        return build(config)


def _put_dense(
    model: nn.Module, weights: Weights, row: Weight, dtype: torch.dtype, device: torch.device, cut: Cut
) -> None:
    """Decode a weight, cut it and put it into the model; buffers are at least float32."""
    path = path_of(row.name)
    owner, _, name = path.rpartition(".")
    if name in model.get_submodule(owner)._buffers:
        dtype = torch.promote_types(dtype, torch.float32)
    if dtype in (torch.bfloat16, torch.float16) and _is_read_by_tiles(weights, row):
        put(model, path, cut(path, _rounded_by_tiles(weights, row, dtype)).to(device))
        return
    read = weights.read(row.name, np.float64 if dtype is torch.float64 else np.float32)
    array = np.require(read, requirements=["C", "W"])
    put(model, path, cut(path, torch.from_numpy(array)).to(device, dtype))


def _is_read_by_tiles(weights: Weights, row: Weight) -> bool:
    """Tell if the rows of a matrix lie in the file as the model has them, with the numbers of the file."""
    slot = weights.slots[row.name]
    as_in_file = slot.layout is AS_IS and not slot.interleaved_heads and slot.must_equal is None
    return as_in_file and len(row.shape) == 2 and not weights.is_changed(row.name)


def _rounded_by_tiles(weights: Weights, row: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Round a matrix to half precision some rows at a time, so that it is never whole in float32."""
    stored, made = weights.as_stored(row.name), torch.empty(row.shape, dtype=dtype)
    stored.require_scales()
    for start, tile in stored.tiles():
        stored.require_finite(start, tile)
        made[start : start + len(tile)] = torch.from_numpy(tile)
    return made


def _put_packed(
    model: nn.Module, weights: Weights, row: Weight, kind: Kind, dtype: torch.dtype, device: torch.device, cut: Cut,
    pages: LargePages,
) -> None:  # fmt: skip
    """Replace the module that a matrix belongs to by one that keeps it packed."""
    slot, stored = weights.slots[row.name], _packed_matrices(weights, row)
    stay = cut is all_of and device.type == "cpu" and (len(stored) == 1 or not isinstance(kind, Table))
    use_pages = kind not in HALF_TYPES  # whose products, as measured, gain nothing from large pages
    empty = LargePages().empty if not stay else pages.empty if use_pages else torch.empty
    fields = _fields(stored, kind, slot.interleaved_heads, empty)
    fields = {name: cut(path_of(row.name), field).to(device) for name, field in fields.items()}
    _require_finite(fields, kind, stored)
    if isinstance(kind, Table) and device.type == "cuda":
        fields = shorten(fields)
    if use_pages:
        fields = pages.copied(fields)
    columns = None if slot.layout.columns is None else slot.layout.columns.index()
    if (order := group_order(stored[0])) is not None:
        columns = np.argsort(order)
    put_fields(model, row, fields, kind, dtype, columns)


def _fields(stored: Sequence[Packed], kind: Kind, interleaved_heads: int, empty: Callable[..., torch.Tensor]) -> Fields:
    """Take a matrix, or those of all experts, apart; `empty` makes the large tensors."""
    if isinstance(kind, Table):
        in_order = [one for one in map(in_group_order, stored) if isinstance(one, QuantisedMatrix)]
        parts = [pack_stored(one, kind, empty) for one in in_order]
        return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return pack_file_blocks(stored, kind, interleaved_heads, empty)


def _packed_matrices(weights: Weights, row: Weight) -> list[Packed]:
    """Return the packed matrix of a weight, or the packed matrices of all experts."""
    if len(row.shape) == 3:
        return [weights.expert_as_stored(row.name, number) for number in range(row.shape[0])]
    return [rows_of(weights.as_stored(row.name), weights.slots[row.name].layout)]


def put_fields(
    model: nn.Module, row: Weight, fields: Fields, kind: Kind, dtype: torch.dtype, columns: np.ndarray | None = None
) -> None:
    """Set the module of a packed weight; `columns` reorders its inputs."""
    if row.name == "embed_tokens":
        kernel = QuantisedEmbedding(fields, kind, dtype)
    elif len(row.shape) == 3:
        kernel = QuantisedExperts(fields, kind, row.shape[0])
    else:
        kernel = QuantisedLinear(fields, kind)
        if columns is not None:
            kernel = Reordered(kernel, torch.from_numpy(columns).to(fields["codes"].device))
    model.set_submodule(path_of(row.name).removesuffix(".weight"), kernel)


def _require_finite(fields: Fields, kind: Kind, stored: Sequence[Packed]) -> None:
    """Refuse what decodes to NaN or infinity: that is so exactly when a float of a block is not finite."""
    for one in stored:
        one.require_scales()
    if not all(_is_finite(field) for field in fields.values() if field.is_floating_point()) or (
        isinstance(kind, Table) and not has_finite_numbers(fields, kind)
    ):
        for one in stored:
            for start, tile in one.tiles():  # decoded once more to say where
                one.require_finite(start, tile)


def _is_finite(field: torch.Tensor) -> bool:
    """Tell if all numbers are finite, in one pass: the least and the largest are NaN if one is."""
    return all(map(math.isfinite, field.aminmax()))
