"""Load the weights of a file or folder into the torch model, one tensor at a time.

Paths of weights in the torch modules are those of transformers, except stacked experts and a delta net's decay. A
packed matrix is a quantised one that keeps its codes and scales; its kind is its format (`stored_kinds`).

A product with the matrix of a quantised folder reads its codes in sequence. With 4 kB pages the processor needs an
address lookup for every 64 cache lines, and it does not prefetch across a page. `LargePages` uses pages of 2 MB, which
Linux gives on request (measured: 1.04 to 1.15 times as fast). Linux may take a second to find such pages for 0.5 GB.
Source: madvise(2), MADV_HUGEPAGE.
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
from llorch.files.quant import GGMLType, float_scales
from llorch.files.quantised.fields import Table, group_order, has_finite_numbers
from llorch.files.quantised.matrix import QuantisedMatrix
from llorch.files.tensor_names import LAYER_WEIGHTS, MODEL_WEIGHTS, Weight, inventory, layer_prefixes
from llorch.files.tensor_storage import AS_IS, rows_of
from llorch.pytorch.causal_lm import CausalLM, widened
from llorch.pytorch.kernels.packing import Fields, Kind, arrays_of, file_fields, shorten
from llorch.pytorch.kernels.quantised_linear import QuantisedEmbedding, QuantisedLinear, Reordered
from llorch.pytorch.models.experts import QuantisedExperts
from llorch.pytorch.models.families import build
from llorch.pytorch.stored_kinds import kind_of, pack_stored, read_blocks, stays_half
from llorch.runtime.memory import return_freed_memory

_FIELDS = {"mlp": "mlp", "router": "gate", "e": ""}  # of name templates: no expert number, because experts are stacked
PATHS = {w.name: w.huggingface.format(**_FIELDS).replace("..", ".") for w in (*MODEL_WEIGHTS, *LAYER_WEIGHTS)}
PATHS["decay"] = "linear_attn.decay"


def path_of(name: str) -> str:
    """Return the attribute path of a weight, given its canonical name."""
    *prefix, weight_name = name.split(".")
    return (layer_prefixes(int(prefix[1]))[2] if prefix else "") + PATHS[weight_name]


_CHUNK = 1 << 26  # bytes per mapping; untouched pages of it take no memory
_LEAST = 1 << 14  # bytes of the smallest tensor that is worth a copy
_LINE = 64  # bytes of a cache line


class LargePages:
    """Memory in large pages for the weights of one model, freed with this object and the last tensor in it."""

    def __init__(self) -> None:
        """Start without memory."""
        self._chunks: list[tuple[int, mmap.mmap]] = []  # address, memory
        self._n_used = 0  # bytes used in the last chunk

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialised CPU tensor; small tensors, or all without large pages, use ordinary memory."""
        tensor = self._allocate(torch.Size(shape), dtype)
        return torch.empty(shape, dtype=dtype) if tensor is None else tensor

    def copied(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy CPU tensors into large pages; small tensors and tensors already in large pages stay."""
        return {name: self._copied(field) for name, field in fields.items()}

    def _copied(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu" or self._holds(tensor):
            return tensor
        copy = self._allocate(tensor.shape, tensor.dtype)
        return tensor if copy is None else copy.copy_(tensor)

    def _holds(self, tensor: Tensor) -> bool:
        return any(address <= tensor.data_ptr() < address + len(chunk) for address, chunk in self._chunks)

    def _allocate(self, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Allocate memory for a tensor; None if it is small, or if large pages or memory are missing."""
        size = shape.numel() * dtype.itemsize
        if size < _LEAST or not self._reserve(size):
            return None
        start, self._n_used = self._n_used, self._n_used + -(-size // _LINE) * _LINE
        return torch.frombuffer(self._chunks[-1][1], dtype=dtype, count=shape.numel(), offset=start).view(shape)

    def _reserve(self, size: int) -> bool:
        """Map another chunk if the last one has no room; False if that fails."""
        if self._chunks and self._n_used + size <= len(self._chunks[-1][1]):
            return True
        try:
            chunk = mmap.mmap(-1, max(size, _CHUNK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            chunk.madvise(mmap.MADV_HUGEPAGE)
        except (AttributeError, OSError):
            return False
        self._chunks.append((torch.frombuffer(chunk, dtype=torch.uint8).data_ptr(), chunk))
        self._n_used = 0
        return True


BETWEEN_RETURNS = 1 << 25  # bytes read between two returns of freed memory to the system

Cut = Callable[[str, torch.Tensor], torch.Tensor]  # (path, weight or packed field) -> the part that this process keeps


def all_of(path: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor unchanged: the `cut` of a process that has the whole model."""
    return tensor


def load_dense(weights: Weights, *, dtype: torch.dtype, device: torch.device, cut: Cut = all_of) -> CausalLM:
    """Load frozen weights in one dtype; `cut` keeps a rank's part of each. NaN and infinity are refused."""
    model = _build_on_meta(weights.config)
    for weight in _iterate_weights(weights):
        _put_dense(model, weights, weight, dtype, device, cut)
    return completed(model)


def load_packed(weights: Weights, *, dtype: torch.dtype, device: torch.device, cut: Cut = all_of) -> CausalLM:
    """Load as `load_dense` does, but keep quantised matrices packed and `stays_half` matrices in 16 bits."""
    model, pages = _build_on_meta(weights.config), LargePages()
    for weight in _iterate_weights(weights):
        kind = _packed_kind(weights, weight, dtype, device, cut)
        if kind is not None:
            _put_packed(model, weights, weight, kind, dtype, device, cut, pages)
        else:
            _put_dense(model, weights, weight, dtype, device, cut)
    return completed(model)


def completed(model: CausalLM) -> CausalLM:
    """Tie the output matrix to the embedding if the config says so, and set eval mode."""
    if model.config.tie_word_embeddings:
        embedding = model.model.embed_tokens
        if isinstance(embedding, QuantisedEmbedding):
            model.lm_head = QuantisedLinear(embedding.fields, embedding.ggml_type)
        else:
            model.lm_head.weight = embedding.weight
    return model.eval()


def _iterate_weights(weights: Weights) -> Iterator[Weight]:
    """Yield each weight to load; afterwards release its file pages and, now and then, freed memory."""
    n_read = 0
    for weight in inventory(weights.config).values():
        yield weight
        weights.search_zeros(weight.name)
        for matrix in weights.all_stored(weight.name):
            release_pages(matrix.raw)
            n_read += matrix.n_bytes
        if n_read > BETWEEN_RETURNS:
            return_freed_memory()
            n_read = 0
    return_freed_memory()


def _packed_kind(weights: Weights, weight: Weight, dtype: torch.dtype, device: torch.device, cut: Cut) -> Kind | None:
    """Return the kind in which a weight stays packed, or in 16 bits; None: it is decoded."""
    if not weight.is_matrix:
        return None
    stored_type = weights.stored_type(weight.name)
    if isinstance(stored_type, GGMLType) and len(weight.shape) == 2:
        columns = cut(path_of(weight.name), torch.empty(weight.shape, device="meta")).shape[1]
        if stays_half(weights, weight.name, columns, dtype, device):
            return stored_type
    return kind_of(weights, weight.name, device.type)


def put(model: nn.Module, path: str, tensor: torch.Tensor) -> None:
    """Set a frozen parameter, or a buffer in at least float32, by its attribute path."""
    name, owner = path.rpartition(".")[2], model.get_submodule(path.rpartition(".")[0])
    setattr(owner, name, widened(tensor) if name in owner._buffers else nn.Parameter(tensor, requires_grad=False))


class _NoInitialValues(TorchFunctionMode):
    """Mode that skips weight initialisation; on the meta device torch would import its compiler for it."""

    def __torch_function__(
        self, func: Callable, types: Sequence, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def _build_on_meta(config: ModelConfig) -> CausalLM:
    """Build the modules on the meta device, where parameters take no memory."""
    with torch.device("meta"), _NoInitialValues():
        return build(config)


def _put_dense(
    model: nn.Module, weights: Weights, weight: Weight, dtype: torch.dtype, device: torch.device, cut: Cut
) -> None:
    """Decode a weight, cut it and set it in the model; buffers are at least float32."""
    path = path_of(weight.name)
    owner, _, name = path.rpartition(".")
    if name in model.get_submodule(owner)._buffers:
        dtype = torch.promote_types(dtype, torch.float32)
    if dtype in (torch.bfloat16, torch.float16) and _is_read_by_tiles(weights, weight):
        put(model, path, cut(path, _round_by_tiles(weights, weight, dtype)).to(device))
        return
    decoded = weights.read(weight.name, np.float64 if dtype is torch.float64 else np.float32)
    array = np.require(decoded, requirements=["C", "W"])
    put(model, path, cut(path, torch.from_numpy(array)).to(device, dtype))


def _is_read_by_tiles(weights: Weights, weight: Weight) -> bool:
    """Tell if the file stores a matrix with the model's row order and values, so that rows can be decoded alone."""
    slot = weights.slots[weight.name]
    as_in_file = slot.layout is AS_IS and not slot.interleaved_heads and slot.must_equal is None
    return as_in_file and len(weight.shape) == 2 and not weights.is_changed(weight.name)


def _round_by_tiles(weights: Weights, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Round a matrix to half precision a few rows at a time, so that it is never whole in float32."""
    matrix, rounded = weights.as_stored(weight.name), torch.empty(weight.shape, dtype=dtype)
    matrix.require_scales()
    for start, tile in matrix.tiles():
        matrix.require_finite(start, tile)
        rounded[start : start + len(tile)] = torch.from_numpy(tile)
    return rounded


def _put_packed(
    model: nn.Module, weights: Weights, weight: Weight, kind: Kind, dtype: torch.dtype, device: torch.device, cut: Cut,
    pages: LargePages,
) -> None:  # fmt: skip
    """Replace the module of a matrix by a module that keeps it packed."""
    slot, matrices = weights.slots[weight.name], _packed_matrices(weights, weight)
    # otherwise the packed tensors are copied once more (cut, moved, or experts joined), so they get temporary memory
    stays_on_cpu = cut is all_of and device.type == "cpu" and (len(matrices) == 1 or not isinstance(kind, Table))
    use_pages = isinstance(kind, Table)  # measured: products with blocks or 16 bits gain less than the pages cost
    empty = LargePages().empty if not stays_on_cpu else pages.empty if use_pages else torch.empty
    fields = _read_fields(matrices, kind, slot.interleaved_heads, empty)
    fields = {name: cut(path_of(weight.name), field) for name, field in fields.items()}
    _require_finite(fields, kind, matrices)
    fields = {name: field.to(device) for name, field in fields.items()}
    if device.type == "cuda":
        fields = shorten(fields) if isinstance(kind, Table) else file_fields(fields["blocks"], kind)
    if use_pages:
        fields = pages.copied(fields)
    columns = None if slot.layout.columns is None else slot.layout.columns.index()
    if (input_order := group_order(matrices[0])) is not None:  # `pack_table` has moved columns of one scale together
        columns = np.argsort(input_order)
    put_fields(model, weight, fields, kind, dtype, columns)


def _read_fields(
    matrices: Sequence[Packed], kind: Kind, interleaved_heads: int, empty: Callable[..., torch.Tensor]
) -> Fields:
    """Read the fields of a matrix, or of the matrices of all experts, on the CPU; `empty` makes the large tensors."""
    if isinstance(kind, Table):
        parts = [pack_stored(matrix, kind, empty) for matrix in matrices if isinstance(matrix, QuantisedMatrix)]
        return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return file_fields(read_blocks(matrices, interleaved_heads, empty), kind)


def _packed_matrices(weights: Weights, weight: Weight) -> list[Packed]:
    """Return the packed matrix of a weight, or the packed matrices of all experts."""
    if len(weight.shape) == 3:
        return [weights.expert_as_stored(weight.name, expert) for expert in range(weight.shape[0])]
    return [rows_of(weights.as_stored(weight.name), weights.slots[weight.name].layout)]


def put_fields(
    model: nn.Module, weight: Weight, fields: Fields, kind: Kind, dtype: torch.dtype, columns: np.ndarray | None = None
) -> None:
    """Set the module of a packed weight; `columns` gives the column of each input if their orders differ."""
    if weight.name == "embed_tokens":
        kernel = QuantisedEmbedding(fields, kind, dtype)
    elif len(weight.shape) == 3:
        kernel = QuantisedExperts(fields, kind, weight.shape[0])
    else:
        kernel = QuantisedLinear(fields, kind)
        if columns is not None:
            kernel = Reordered(kernel, torch.from_numpy(columns).to(next(iter(fields.values())).device))
    model.set_submodule(path_of(weight.name).removesuffix(".weight"), kernel)


def _require_finite(fields: Fields, kind: Kind, matrices: Sequence[Packed]) -> None:
    """Refuse a matrix that decodes to NaN or infinity, from a scale or a number of its table that is not finite."""
    for matrix in matrices:
        matrix.require_scales()
    if not all(map(_is_finite, _scale_fields(fields, kind))) or (
        isinstance(kind, Table) and not has_finite_numbers(arrays_of(fields), kind)
    ):
        for matrix in matrices:
            for start, tile in matrix.tiles():  # decode once more, so that the error names the row
                matrix.require_finite(start, tile)


def _scale_fields(fields: Fields, kind: Kind) -> Iterator[torch.Tensor]:
    """Yield the floats of a packed matrix: its scales, or all numbers of 16 bits."""
    if "blocks" not in fields:
        yield from (field for field in fields.values() if field.is_floating_point())
    elif isinstance(kind, GGMLType):
        yield from (torch.from_numpy(scales) for scales in float_scales(fields["blocks"].numpy(), kind))


def _is_finite(field: torch.Tensor) -> bool:
    """Tell if all numbers are finite in one pass: minimum and maximum are NaN if any number is."""
    return all(map(math.isfinite, field.aminmax()))
