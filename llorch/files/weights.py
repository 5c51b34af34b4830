"""The weights of an open model by canonical name, each loaded when it is first asked for."""

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
from llorch.files.matrix import Matrix
from llorch.files.packed import Packed, StoredType, require_finite
from llorch.files.quant import ACTIVATION_TYPE, BLOCK_SIZES, GGMLType
from llorch.files.quantised import QuantisedFolder
from llorch.files.quantised.activations import Activations
from llorch.files.tensor_names import undo_interleave
from llorch.files.tensor_storage import AS_IS, Layout, expert_of, rows_of
from llorch.files.zeros import ZeroSearch
from llorch.ops.numerics import EXACT, SCHEME, Numerics
from llorch.ops.scheme_rounding import SchemeRounding
from llorch.runtime.errors import FormatError, cut


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one weight is found."""

    source_name: str  # of a tensor for each expert with `{e}` in place of the number
    shape: tuple[int, ...]
    interleaved_heads: int = 0  # rows to be reordered; 0: none
    must_equal: str | None = None  # a second tensor that has to hold the same numbers
    is_matrix: bool | None = None  # None: if it has two axes
    layout: Layout = AS_IS

    @property
    def multiplied(self) -> bool:
        """True if it is a matrix that inputs are multiplied with, or a stack of them."""
        return len(self.shape) > 1 if self.is_matrix is None else self.is_matrix

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that it is read from."""
        if "{e}" not in self.source_name:
            return {self.source_name: self.layout.shape or self.shape}
        return {self.source_name.format(e=e): self.shape[1:] for e in range(self.shape[0])}


# Mapping without types: with them, the run-time type checker of the tests loads a tensor at every call.
class Weights(Mapping):
    """The weights of a model by canonical name: arrays, and matrices that multiply themselves; see `open_weights`."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        path: Path,
        source: GGUFFile | SafetensorsFolder,
        slots: Mapping[str, Slot],
        left_out: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        """Wrap an open file that was checked; `left_out` counts tensors that llorch ignores, by part and prefix."""
        self.config = config
        self.path = path
        self.source = source
        self.dtype: type[np.floating] = np.float32
        self.numerics = EXACT
        self.packed = False
        self._activations = Activations()
        self.slots = slots
        self.left_out = {} if left_out is None else left_out
        self._loaded: dict[str, np.ndarray] = {}  # float32, shared by all variants
        self._matrices: dict[str, Matrix | np.ndarray] = {}
        self._keeps = False
        self._zeros = ZeroSearch(source, _never_zero(slots))
        self._layers: list[dict[str, str]] = [{} for _ in range(config.n_layers)]  # short to canonical name
        for name in slots:
            if name.startswith("layers."):
                _, index, short = name.split(".")
                self._layers[int(index)][short] = name

    def __getitem__(self, name: str) -> Any:
        if len(self.slots[name].shape) == 3:
            return ExpertStack(self, name)
        is_matrix = self._multiplies_itself(self.slots[name])
        if not (is_matrix or self._keeps):
            return self.array(name)
        if name not in self._matrices:
            self._matrices[name] = self._matrix(name) if is_matrix else self.array(name)
        return self._matrices[name]

    def array(self, name: str) -> np.ndarray:
        """Return the decoded array in the dtype of these weights, whatever the numerics.

        A packed array is decoded anew each time. Experts come all together and are never kept. Gains that are stored
        less one are returned with the one added, rounded to this dtype.
        """
        slot = self.slots[name]
        if name not in self._loaded:
            array = self.read(name) if slot.layout.form == "plain" else self._in_order(name)
            if len(slot.shape) == 3 or (self.packed and self._multiplies_itself(slot)):
                return array.astype(self.dtype, copy=False)
            self._loaded[name] = array
        elif not self._loaded[name].flags.writeable:  # a view of the map
            self.source.require_whole(slot.source_name)
        return slot.layout.made(self._loaded[name], self.dtype)

    def read(self, name: str, dtype: type[np.floating] = np.float32) -> np.ndarray:
        """Decode a weight anew, without keeping it; a view of the map for F32 whose rows keep their order."""
        slot = self.slots[name]
        made = slot.layout.made(self._in_order(name), dtype)
        if name.endswith(".decay") and not (made <= 0).all():
            message = f"{slot.source_name}: expected -exp(A_log), at most 0, got {made.max():.6g}"
            raise FormatError(
                "Inconsistent", f"{message} (from an old converter); convert the model again", path=self.path
            )
        return made

    def require_written(self) -> None:
        """Refuse (Truncated) a file that is zero from a weight on to its end."""
        self._zeros.search_ends_of_files()

    def search_zeros(self, name: str, expert: int | None = None) -> None:
        """Look for zeros at the end of a weight that is read, or of one expert; see `llorch.files.zeros`."""
        slot = self.slots[name]
        if len(slot.shape) != 3:
            self._zeros.search(slot.source_name)
            return
        for number in range(slot.shape[0]) if expert is None else [expert]:
            self._zeros.search(slot.source_name.format(e=number), None if "{e}" in slot.source_name else number)

    def _in_order(self, name: str) -> np.ndarray:
        """Read the numbers that a file has for a weight, in the order of Hugging Face."""
        slot, arrays = self.slots[name], []
        for tensor in slot.tensors:
            arrays.append(self.source.array(tensor))
            require_finite(arrays[-1], tensor, self.path)
        self.search_zeros(name)
        self._require_equal(slot)
        array = arrays[0] if len(arrays) == 1 else np.stack(arrays)
        array = slot.layout.taken(array, slot.shape)
        return undo_interleave(array, slot.interleaved_heads) if slot.interleaved_heads else array

    def expert(self, name: str, number: int) -> Any:
        """Return one expert of a stack: an array in the dtype of these weights, or a `Matrix` with its own product."""
        slot, key = self.slots[name], f"{name}.{number}"
        if key in self._matrices:
            return self._matrices[key]
        if self._multiplies_itself(slot):
            packed = self.expert_as_stored(name, number)
            self._matrices[key] = self._over(packed, None if self.packed else self._expert_array(name, number))
            self.search_zeros(name, number)
            return self._matrices[key]
        array = self._expert_array(name, number).astype(self.dtype, copy=False)
        if self._keeps:
            self._matrices[key] = array
        return array

    def _expert_array(self, name: str, number: int) -> np.ndarray:
        """Return one expert as float32, decoded once."""
        key = f"{name}.{number}"
        if key not in self._loaded:
            self._loaded[key] = self.read_expert(name, number)
        elif not self._loaded[key].flags.writeable:
            self.source.require_whole(next(iter(self.slots[name].tensors)))
        return self._loaded[key]

    def read_expert(self, name: str, number: int) -> np.ndarray:
        """Return one expert as float32, decoded anew and not kept; F32 that is not transposed is a view of the file."""
        packed = self.expert_as_stored(name, number)
        is_f32 = packed.ggml_type is GGMLType.F32
        array = np.require(packed.raw.view("<f4"), requirements="A") if is_f32 else packed.decode()
        require_finite(array.reshape(packed.shape), packed.name, self.path)
        self.search_zeros(name, number)
        return array.reshape(packed.shape)

    def expert_as_stored(self, name: str, number: int) -> Packed:
        """Return one expert of a stack, (out, in), in the type of the file; nothing is decoded."""
        slot = self.slots[name]
        if "{e}" in slot.source_name:
            return self.source.packed(slot.source_name.format(e=number))
        return expert_of(self.source.packed(slot.source_name), slot.layout, number)

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
        """Hand out arrays of another type: widened on each access, or with `keep` once, which takes memory for all."""
        other = copy(self)
        other.dtype = dtype
        other._keeps = keep
        other._matrices = {}
        return other

    def using(self, numerics: Numerics | None = None, *, packed: bool | None = None) -> "Weights":
        """Choose how matrices are multiplied, and whether they stay packed; None keeps it.

        TypeError for what is no `Numerics`; FormatError Unsupported for numerics that these weights do not have.
        """
        if not isinstance(numerics, Numerics | None):
            message = "numerics: expected an instance of Numerics, as EXACT, GGML and SCHEME of llorch.ops.numerics are"
            raise TypeError(f"{message}, got {cut(repr(numerics))}")
        other = copy(self)
        other.numerics = self.numerics if numerics is None else numerics
        other._activations = Activations()
        if other.numerics.name == "ggml":
            self._require_products()
        elif other.numerics == SCHEME:
            if not isinstance(self.source, QuantisedFolder):
                message = "scheme numerics: expected a quantised Hugging Face folder, got none; use exact numerics"
                raise FormatError("Unsupported", message, path=self.path)
            other._activations = self.source.activations
        other.packed = self.packed if packed is None else packed
        other._matrices = {}
        return other

    @property
    def cache_dtype(self) -> type[np.floating]:
        """Dtype of keys and values in the cache of a run."""
        return self.numerics.cache_dtype(self.dtype)

    @property
    def cache_rounding(self) -> Mapping[int, tuple[SchemeRounding, SchemeRounding]]:
        """The roundings of keys and values, by layer, before they are stored."""
        return self._activations.caches

    @property
    def rounds_nothing(self) -> bool:
        """Tell if scheme numerics equal exact ones, because the folder quantises weights alone."""
        return not self._activations.inputs and not self._activations.caches

    def notes_on_left_out(self, fate: str) -> list[str]:
        """Tell for each part that llorch leaves out how many tensors it has; `fate` is such as "not judged"."""
        return [
            f"{part}: {sum(counts.values())} tensors ({', '.join(f'{prefix}*' for prefix in counts)}) are {fate}"
            for part, counts in self.left_out.items()
        ]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight, without reading it."""
        return self.slots[name].shape

    def as_stored(self, name: str) -> Packed:
        """Return the tensor of the file that a weight is read from, of experts with their own the first."""
        return self.source.packed(next(iter(self.slots[name].tensors)))

    def all_stored(self, name: str) -> list[Packed]:
        """Return the tensors that a weight is read from: more than one where each expert has its own."""
        return [self.source.packed(tensor) for tensor in self.slots[name].tensors]

    def is_changed(self, name: str) -> bool:
        """Tell if a weight has other numbers than the file, as merged ones have."""
        return False

    def stored_type(self, name: str) -> StoredType:
        """Return the type in which the file stores a weight; for a quantised folder, its scheme."""
        return self.as_stored(name).ggml_type

    def stored_bytes(self, name: str) -> int:
        """Return the bytes that a weight takes in the file."""
        kind = self.stored_type(name)
        if not isinstance(kind, GGMLType):
            return sum(stored.n_bytes for stored in self.all_stored(name))
        block, block_bytes = BLOCK_SIZES[kind]
        return math.prod(self.slots[name].shape) // block * block_bytes

    def _require_products(self) -> None:
        """Refuse what llama.cpp ends the whole process at: there is no emulating that."""
        in_gguf = isinstance(self.source, GGUFFile)
        for name, slot in self.slots.items():
            kind = self.stored_type(name)
            is_matrix = slot.multiplied
            if kind not in ACTIVATION_TYPE if is_matrix else in_gguf and kind is not GGMLType.F32:
                what = "cannot multiply this type" if is_matrix else "reads vectors in F32 only"
                message = f"{slot.source_name} has type {kind.name}, and llama.cpp {what}; use exact numerics"
                raise FormatError("Unsupported", message, path=self.path)

    def _multiplies_itself(self, slot: Slot) -> bool:
        """Tell if a weight is used as a `Matrix`, packed or with rounded inputs, not as an array."""
        if not slot.multiplied or not (self.packed or self.numerics.rounds_activations):
            return False
        return self.source.packed(next(iter(slot.tensors))).ggml_type not in (GGMLType.F32, GGMLType.F64)

    def _matrix(self, name: str) -> Matrix:
        slot = self.slots[name]
        self._require_equal(slot)
        packed = rows_of(self.source.packed(slot.source_name), slot.layout)
        decoded, columns = None, slot.layout.columns
        if not self.packed:
            # Blocks of rounded inputs lie in the order of the file.
            decoded = self.astype(np.float32).array(name) if columns is None else packed.decode()
        matrix = self._over(packed, decoded, slot.interleaved_heads, None if columns is None else columns.index())
        self.search_zeros(name)
        return matrix

    def _over(
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
        )

    def _require_equal(self, slot: Slot) -> None:
        """Refuse a folder with both tied tensors if their numbers differ."""
        if slot.must_equal is None:
            return
        one, other = (self.source.packed(name) for name in (slot.source_name, slot.must_equal))
        if not one.holds_the_same(other):
            wanted = f"the numbers of {slot.source_name} (tie_word_embeddings is true)"
            remedy = f"set tie_word_embeddings to false in config.json, or remove {slot.must_equal} from the file"
            message = f"{slot.must_equal}: expected {wanted}, got others; {remedy}"
            raise FormatError("Inconsistent", message, path=self.path)


def _never_zero(slots: Mapping[str, Slot]) -> dict[str, str]:
    """Map the tensors that must not end with zeros to the short names of their weights."""
    short_names = {name: name.rpartition(".")[2] for name in slots}
    return {
        tensor: short
        for name, short in short_names.items()
        if not (short.endswith("bias") or short == "decay" or slots[name].layout.form == "less_one")
        for tensor in (*slots[name].tensors, slots[name].must_equal)
        if tensor is not None
    }


class LayerWeights(Mapping[str, Any]):
    """The weights of one layer by short name; see `Weights.layer`."""

    def __init__(self, weights: Weights, names: Mapping[str, str]) -> None:
        """Wrap the whole model; `names` are short to canonical."""
        self._weights = weights
        self.names = names

    def __getitem__(self, name: str) -> Any:
        return self._weights[self.names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class ExpertStack(Sequence):
    """The matrices of all experts for one step, each loaded when it is chosen; see `Weights.expert`."""

    def __init__(self, weights: Weights, name: str) -> None:
        """Wrap the whole model; canonical name of the stack."""
        self._weights = weights
        self.name = name
        self.shape = weights.shape(name)

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(f"{self.name}: expert must be from 0 to {len(self) - 1}, got {number}")
        return self._weights.expert(self.name, int(number))

    def __len__(self) -> int:
        return self.shape[0]
