"""Weights of an open model by canonical name, in Hugging Face's order of rows and columns, each loaded at first use."""

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llorch.families.config import ModelConfig
from llorch.files.folder import SafetensorsFolder
from llorch.files.gguf import GGUFFile
from llorch.files.kernel_check import require_kernel
from llorch.files.matrix import Matrix
from llorch.files.packed import Packed, StoredType, require_finite
from llorch.files.quant import ACTIVATION_TYPE, BLOCK_SIZES, GGMLType
from llorch.files.quantised import QuantisedFolder
from llorch.files.quantised.activations import Activations
from llorch.files.tensor_names import undo_interleave
from llorch.files.tensor_storage import AS_IS, Layout, rows_of, select_expert
from llorch.files.zeros import ZeroSearch
from llorch.ops.numerics import EXACT, SCHEME, Numerics
from llorch.ops.scheme_rounding import SchemeRounding
from llorch.runtime.errors import FormatError, cut


@dataclass(frozen=True, slots=True)
class Slot:
    """Location of one weight in a file."""

    source_name: str  # of the tensor; `{e}` stands for the expert's number if each expert has its own tensor
    shape: tuple[int, ...]
    interleaved_heads: int = 0  # heads whose rows are interleaved; 0: none
    must_equal: str | None = None  # second tensor that must have the same values
    is_matrix: bool | None = None  # None: True if it has more than one axis
    layout: Layout = AS_IS

    @property
    def multiplied(self) -> bool:
        """True if the weight is a matrix, or a stack of matrices, of a product."""
        return len(self.shape) > 1 if self.is_matrix is None else self.is_matrix

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that the weight is read from."""
        if "{e}" not in self.source_name:
            return {self.source_name: self.layout.shape or self.shape}
        return {self.source_name.format(e=e): self.shape[1:] for e in range(self.shape[0])}


# Mapping without type arguments: with them, the type checker of the tests would load a tensor at every call.
class Weights(Mapping):
    """Weights of a model by canonical name: arrays, and `Matrix` objects; see `open_weights`."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        path: Path,
        source: GGUFFile | SafetensorsFolder,
        slots: Mapping[str, Slot],
        left_out: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        """Wrap a checked open file; `left_out` counts tensors that llorch ignores, by part of the model and prefix."""
        self.config = config
        self.path = path
        self.source = source
        self.dtype: type[np.floating] = np.float32
        self.numerics = EXACT  # arithmetic of products: exact, ggml's, or that of a folder's quantisation scheme
        self.packed = False  # matrices stay packed, and are decoded at every use
        self._activations = Activations()
        self.slots = slots
        self.left_out = {} if left_out is None else left_out
        self._loaded: dict[str, np.ndarray] = {}  # float32, shared by all variants
        self._matrices: dict[str, Matrix | np.ndarray] = {}
        self._caches_arrays = False
        self._zeros = ZeroSearch(source, _nonzero_tensors(slots))
        self._layers: list[dict[str, str]] = [{} for _ in range(config.n_layers)]  # short to canonical name
        for name in slots:
            if name.startswith("layers."):
                _, index, short = name.split(".")
                self._layers[int(index)][short] = name

    def __getitem__(self, name: str) -> Any:
        if (cached := self._matrices.get(name)) is not None:
            if self.packed:  # it multiplies from the file, which may be truncated by now
                self.source.require_whole(next(iter(self.slots[name].tensors)))
            return cached
        if len(self.slots[name].shape) == 3:
            return ExpertStack(self, name)
        is_matrix = self._multiplies_itself(self.slots[name])
        if not (is_matrix or self._caches_arrays):
            return self.array(name)
        self._matrices[name] = self._matrix(name) if is_matrix else self.array(name)
        return self._matrices[name]

    def array(self, name: str) -> np.ndarray:
        """Return the decoded array in the dtype of these weights, for any numerics.

        A packed array is decoded at every call. Stacks of experts are not cached. Norm weights stored with an offset
        are returned with the one added, rounded to this dtype.
        """
        slot = self.slots[name]
        if name not in self._loaded:
            # Other forms, such as an offset, stay as stored: `compute` below rounds once, to this dtype.
            array = self.read(name) if slot.layout.form == "plain" else self._read_in_order(name)
            if len(slot.shape) == 3 or (self.packed and self._multiplies_itself(slot)):
                return array.astype(self.dtype, copy=False)
            self._loaded[name] = array
        elif not self._loaded[name].flags.writeable:  # a view of the file, which may be truncated by now
            self.source.require_whole(slot.source_name)
        return slot.layout.compute(self._loaded[name], self.dtype)

    def read(self, name: str, dtype: type[np.floating] = np.float32) -> np.ndarray:
        """Decode a weight without caching; a view of the mapped file for F32 in the order of Hugging Face."""
        slot = self.slots[name]
        array = slot.layout.compute(self._read_in_order(name), dtype)
        if name.endswith(".decay") and not (array <= 0).all():
            message = f"{slot.source_name}: expected -exp(A_log), at most 0, got {array.max():.6g}"
            raise FormatError(
                "Inconsistent", f"{message} (from an old converter); convert the model again", path=self.path
            )
        return array

    def require_written(self) -> None:
        """Raise Truncated for a file that is zero from a weight to its end."""
        self._zeros.search_ends_of_files()

    def search_zeros(self, name: str, expert: int | None = None) -> None:
        """Check a weight, or one expert, for zeros at its end; see `llorch.files.zeros`."""
        slot = self.slots[name]
        if len(slot.shape) != 3:
            self._zeros.search(slot.source_name)
            return
        for number in range(slot.shape[0]) if expert is None else [expert]:
            self._zeros.search(slot.source_name.format(e=number), None if "{e}" in slot.source_name else number)

    def _read_in_order(self, name: str) -> np.ndarray:
        """Read the stored values of a weight, in the order of Hugging Face."""
        slot, arrays = self.slots[name], []
        for tensor in slot.tensors:
            arrays.append(self.source.array(tensor))
            require_finite(arrays[-1], tensor, self.path)
        self.search_zeros(name)
        self._require_equal(slot)
        array = arrays[0] if len(arrays) == 1 else np.stack(arrays)
        array = slot.layout.extract(array, slot.shape)
        return undo_interleave(array, slot.interleaved_heads) if slot.interleaved_heads else array

    def expert(self, name: str, number: int) -> Any:
        """Return one expert of a stack: an array in the dtype of these weights, or a `Matrix`, which multiplies."""
        slot, key = self.slots[name], f"{name}.{number}"
        if key in self._matrices:
            return self._matrices[key]
        if self._multiplies_itself(slot):
            packed = self.expert_as_stored(name, number)
            self._matrices[key] = self._as_matrix(packed, None if self.packed else self._expert_array(name, number))
            self.search_zeros(name, number)
            return self._matrices[key]
        array = self._expert_array(name, number).astype(self.dtype, copy=False)
        if self._caches_arrays:
            self._matrices[key] = array
        return array

    def _expert_array(self, name: str, number: int) -> np.ndarray:
        """Return one expert as float32, cached."""
        key = f"{name}.{number}"
        if key not in self._loaded:
            self._loaded[key] = self.read_expert(name, number)
        elif not self._loaded[key].flags.writeable:
            self.source.require_whole(next(iter(self.slots[name].tensors)))
        return self._loaded[key]

    def read_expert(self, name: str, number: int) -> np.ndarray:
        """Return one expert as float32, not cached; a view of the file for F32 that is not transposed."""
        packed = self.expert_as_stored(name, number)
        is_f32 = packed.ggml_type is GGMLType.F32
        array = np.require(packed.raw.view("<f4"), requirements="A") if is_f32 else packed.decode()
        require_finite(array.reshape(packed.shape), packed.name, self.path)
        self.search_zeros(name, number)
        return array.reshape(packed.shape)

    def expert_as_stored(self, name: str, number: int) -> Packed:
        """Return one expert of a stack, (out, in), in its stored type, not decoded."""
        slot = self.slots[name]
        if "{e}" in slot.source_name:
            return self.source.packed(slot.source_name.format(e=number))
        return select_expert(self.source.packed(slot.source_name), slot.layout, number)

    def __iter__(self) -> Iterator[str]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    def layer(self, index: int) -> "LayerWeights":
        """Return the weights of a layer by short name, loaded at first access; IndexError for an unknown layer."""
        if not 0 <= index < self.config.n_layers:
            raise IndexError(f"layer must be from 0 to {self.config.n_layers - 1}, got {index}")
        return LayerWeights(self, self._layers[index])

    def astype(self, dtype: type[np.floating], *, keep: bool = False) -> "Weights":
        """Return these weights in another dtype, converted at each access, or with `keep` once, which takes memory."""
        weights = copy(self)
        weights.dtype = dtype
        weights._caches_arrays = keep
        weights._matrices = {}
        return weights

    def using(self, numerics: Numerics | None = None, *, packed: bool | None = None) -> "Weights":
        """Return these weights with other numerics, or with matrices packed or decoded; None keeps the setting.

        TypeError if `numerics` is no `Numerics`; FormatError Unsupported for numerics that these weights do not have;
        NoKernels if they need kernels of ggml that cannot be used.
        """
        if not isinstance(numerics, Numerics | None):
            message = "numerics: expected an instance of Numerics, as EXACT, GGML and SCHEME of llorch.ops.numerics are"
            raise TypeError(f"{message}, got {cut(repr(numerics))}")
        weights = copy(self)
        weights.numerics = self.numerics if numerics is None else numerics
        weights._activations = Activations()
        if weights.numerics.name == "ggml":
            self._require_products()
            if weights.numerics.kernels == "ggml":
                self._require_kernels()
        elif weights.numerics == SCHEME:
            if not isinstance(self.source, QuantisedFolder):
                message = "scheme numerics: expected a quantised Hugging Face folder, got none; use exact numerics"
                raise FormatError("Unsupported", message, path=self.path)
            weights._activations = self.source.activations
        weights.packed = self.packed if packed is None else packed
        weights._matrices = {}
        return weights

    @property
    def cache_dtype(self) -> type[np.floating]:
        """Dtype of keys and values in the KV cache."""
        return self.numerics.cache_dtype(self.dtype)

    @property
    def cache_rounding(self) -> Mapping[int, tuple[SchemeRounding, SchemeRounding]]:
        """Rounding of keys and values in the KV cache by scheme numerics, by layer."""
        return self._activations.caches

    @property
    def quantises_weights_only(self) -> bool:
        """True if scheme numerics equal exact numerics, because the folder quantises weights only."""
        return not self._activations.inputs and not self._activations.caches

    def notes_on_left_out(self, fate: str) -> list[str]:
        """Describe each part of the model that llorch ignores; `fate` completes the sentence, as in "not judged"."""
        return [
            f"{part}: {sum(counts.values())} tensors ({', '.join(f'{prefix}*' for prefix in counts)}) are {fate}"
            for part, counts in self.left_out.items()
        ]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight, without reading it."""
        return self.slots[name].shape

    def as_stored(self, name: str) -> Packed:
        """Return the stored tensor of a weight; the first expert's if each expert has its own tensor."""
        return self.source.packed(next(iter(self.slots[name].tensors)))

    def as_rows(self, name: str) -> Packed:
        """Return the stored rows of a matrix; a part of the tensor if several weights share it."""
        return rows_of(self.as_stored(name), self.slots[name].layout)

    def all_stored(self, name: str) -> list[Packed]:
        """Return the stored tensors of a weight: several if each expert has its own tensor."""
        return [self.source.packed(tensor) for tensor in self.slots[name].tensors]

    def is_changed(self, name: str) -> bool:
        """Check if a weight differs from the file; only the subclass for merged adapters changes weights."""
        return False

    def stored_type(self, name: str) -> StoredType:
        """Return the stored type of a weight; for a quantised folder, its scheme."""
        return self.as_stored(name).ggml_type

    def stored_bytes(self, name: str) -> int:
        """Return the number of bytes of a weight in the file."""
        kind = self.stored_type(name)
        if not isinstance(kind, GGMLType):
            return sum(tensor.n_bytes for tensor in self.all_stored(name))
        block, block_bytes = BLOCK_SIZES[kind]
        return math.prod(self.slots[name].shape) // block * block_bytes

    def _require_products(self) -> None:
        """Raise Unsupported for weight types at which llama.cpp aborts: there is no arithmetic to reproduce."""
        in_gguf = isinstance(self.source, GGUFFile)
        for name, slot in self.slots.items():
            kind = self.stored_type(name)
            is_matrix = slot.multiplied
            if kind not in ACTIVATION_TYPE if is_matrix else in_gguf and kind is not GGMLType.F32:
                limitation = "cannot multiply this type" if is_matrix else "reads vectors in F32 only"
                message = f"{slot.source_name} has type {kind.name}, and llama.cpp {limitation}; use exact numerics"
                raise FormatError("Unsupported", message, path=self.path)

    def _require_kernels(self) -> None:
        """Compare ggml's product of the first matrix of each type with llorch's; NoKernels if they differ."""
        first: dict[StoredType, str] = {}
        for name, slot in self.slots.items():
            kind = self.stored_type(name)
            if slot.multiplied and kind is not GGMLType.F32 and first.setdefault(kind, name) == name:
                require_kernel(self.expert_as_stored(name, 0) if len(slot.shape) == 3 else self.as_rows(name))

    def _multiplies_itself(self, slot: Slot) -> bool:
        """Check if a weight becomes a `Matrix`, packed or with rounded inputs; F32 and F64 weights stay arrays."""
        if not slot.multiplied or not (self.packed or self.numerics.rounds_activations):
            return False
        return self.source.packed(next(iter(slot.tensors))).ggml_type not in (GGMLType.F32, GGMLType.F64)

    def _matrix(self, name: str) -> Matrix:
        slot = self.slots[name]
        self._require_equal(slot)
        packed = self.as_rows(name)
        decoded, columns = None, slot.layout.columns
        if not self.packed:
            # Inputs are rounded by blocks, which need the column order of the file.
            decoded = self.astype(np.float32).array(name) if columns is None else packed.decode()
        matrix = self._as_matrix(packed, decoded, slot.interleaved_heads, None if columns is None else columns.index())
        self.search_zeros(name)
        return matrix

    def _as_matrix(
        self, packed: Packed, decoded: np.ndarray | None, heads: int = 0, columns: np.ndarray | None = None
    ) -> Matrix:
        return Matrix(
            packed,
            dtype=self.dtype,
            round_inputs=self.numerics.name == "ggml",
            scheme=self._activations.inputs.get(packed.name),
            decoded=decoded,
            interleaved_heads=heads,
            columns=columns,
            kernels=self.numerics.kernels,
        )

    def _require_equal(self, slot: Slot) -> None:
        """Raise Inconsistent if a folder has both tied tensors and their values differ."""
        if slot.must_equal is None:
            return
        first, second = (self.source.packed(name) for name in (slot.source_name, slot.must_equal))
        if not first.has_equal_values(second):
            expected = f"the numbers of {slot.source_name} (tie_word_embeddings is true)"
            remedy = f"set tie_word_embeddings to false in config.json, or remove {slot.must_equal} from the file"
            message = f"{slot.must_equal}: expected {expected}, got others; {remedy}"
            raise FormatError("Inconsistent", message, path=self.path)


def _nonzero_tensors(slots: Mapping[str, Slot]) -> dict[str, str]:
    """Map the tensors that must not end with zeros, see `files/zeros.py`, to the short names of their weights."""
    short_names = {name: name.rpartition(".")[2] for name in slots}
    return {
        tensor: short_name
        for name, short_name in short_names.items()
        if not (short_name.endswith("bias") or short_name == "decay" or slots[name].layout.form == "less_one")
        for tensor in (*slots[name].tensors, slots[name].must_equal)
        if tensor is not None
    }


class LayerWeights(Mapping[str, Any]):
    """Weights of one layer by short name; see `Weights.layer`."""

    def __init__(self, weights: Weights, names: Mapping[str, str]) -> None:
        """Wrap the weights of the model; `names` maps short to canonical names."""
        self._weights = weights
        self.names = names

    def __getitem__(self, name: str) -> Any:
        return self._weights[self.names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class ExpertStack(Sequence):
    """Matrices of all experts for one projection, each loaded when it is selected; see `Weights.expert`."""

    def __init__(self, weights: Weights, name: str) -> None:
        """Wrap the weights of the model; `name` is the canonical name of the stack."""
        self._weights = weights
        self.name = name
        self.shape = weights.shape(name)

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(f"{self.name}: expert must be from 0 to {len(self) - 1}, got {number}")
        return self._weights.expert(self.name, int(number))

    def __len__(self) -> int:
        return self.shape[0]
