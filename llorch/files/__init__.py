"""Files of models: bytes to arrays, and back.

In comes a path, of a GGUF file or a Hugging Face folder. Out come `Weights`, on this page: arrays by canonical name,
whatever file they are from, each loaded when it is first asked for. Opening checks that the file holds exactly the
tensors that its configuration asks for, and lists every fault at once. A tensor that is missing is never filled in
(transformers fills it with random numbers), an extra one never dropped: both mean that the file and the configuration
speak of different models. In the order to read:

    names        which weights a model has, what they are called where, the row order of q and k
    mapped       a file opened once, mapped, watched for change; `metadata` and `gguf` read a GGUF file through it,
                 `strict_json`, `safetensors` and `folder` a Hugging Face folder
    quant        the types of ggml, decoded by `blocks/`; `packed` is a tensor as stored, `matrix` multiplies with one
    residency    whether matrices lie decoded or packed while a model runs
    encode       float32 to those types; `export` and `export_huggingface` write whole models, `new_file` puts what is
                 written in its place, complete or not at all
"""

import logging
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llorch.config import ModelConfig
from llorch.errors import ErrorCode, FormatError
from llorch.files.folder import PICKLE_SUFFIXES, SafetensorsFolder, file_inside
from llorch.files.gguf import GGUFFile, StringArray, TensorInfo, open_gguf
from llorch.files.matrix import Matrix
from llorch.files.names import inventory, undo_interleave
from llorch.files.packed import Packed, require_finite
from llorch.files.quant import ACTIVATION_TYPE, GGMLType
from llorch.files.safetensors import SafetensorsFile, open_safetensors
from llorch.files.strict_json import read_json
from llorch.numerics import EXACT, Numerics

__all__ = [
    "GGUFFile", "LayerWeights", "SafetensorsFile", "SafetensorsFolder", "StringArray", "TensorInfo", "Weights",
    "open_gguf", "open_safetensors", "open_weights",
]  # fmt: skip

logger = logging.getLogger(__name__)

_MAX_CONFIG = 1 << 20
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one weight is found."""

    source_name: str
    shape: tuple[int, ...]
    interleaved_heads: int = 0  # rows to be reordered; 0: none
    must_equal: str | None = None  # a second tensor that has to hold the same numbers


# Mapping without types: with them, the run-time type checker of the tests loads a tensor at every call.
class Weights(Mapping):
    """The weights of a model by canonical name: arrays, and matrices that multiply themselves; see `open_weights`."""

    def __init__(
        self, *, config: ModelConfig, path: Path, source: GGUFFile | SafetensorsFolder, slots: Mapping[str, Slot]
    ) -> None:
        """Wrap an open file that was checked against its configuration; slots by canonical name."""
        self.config = config
        self.path = path
        self.source = source
        self.dtype: type[np.floating] = np.float32
        self.numerics = EXACT
        self.packed = False
        self.slots = slots
        self._loaded: dict[str, np.ndarray] = {}  # float32, shared by all variants
        self._matrices: dict[str, Matrix | np.ndarray] = {}
        self._keeps = False
        self._layers: list[dict[str, str]] = [{} for _ in range(config.n_layers)]  # short to canonical name
        for name in slots:
            if name.startswith("layers."):
                _, index, short = name.split(".")
                self._layers[int(index)][short] = name

    def __getitem__(self, name: str) -> Any:
        is_matrix = self._multiplies_itself(self.slots[name])
        if not (is_matrix or self._keeps):
            return self.array(name)
        if name not in self._matrices:
            self._matrices[name] = self._matrix(name) if is_matrix else self.array(name)
        return self._matrices[name]

    def array(self, name: str) -> np.ndarray:
        """The decoded array in the dtype of these weights, whatever the numerics; decoded anew each time if packed."""
        if name in self._loaded:
            if not self._loaded[name].flags.writeable:  # a view of the map
                self.source.require_whole(self.slots[name].source_name)
            return self._loaded[name].astype(self.dtype, copy=False)
        array = self.read(name)
        if not (self.packed and self._multiplies_itself(self.slots[name])):
            self._loaded[name] = array
        return array.astype(self.dtype, copy=False)

    def read(self, name: str) -> np.ndarray:
        """A weight as float32, decoded anew and not kept; for F32 whose rows need no reordering a view of the map."""
        slot = self.slots[name]
        array = self.source.array(slot.source_name)
        require_finite(array, slot.source_name, self.path)
        if slot.must_equal is not None:
            self._require_equal(slot)
        return undo_interleave(array, slot.interleaved_heads) if slot.interleaved_heads else array

    def __iter__(self) -> Iterator[str]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    def layer(self, index: int) -> "LayerWeights":
        """The weights of one layer by short name, `q_proj`, `attn_norm`, ..., each loaded when it is asked for."""
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
        """Choose how matrices are multiplied, and whether they stay packed; None keeps it."""
        other = copy(self)
        other.numerics = self.numerics if numerics is None else numerics
        if other.numerics.rounds_activations:
            self._require_products()
        other.packed = self.packed if packed is None else packed
        other._matrices = {}
        return other

    @property
    def cache_dtype(self) -> type[np.floating]:
        """Dtype of keys and values in the cache of a run."""
        return self.numerics.cache_dtype(self.dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight, without reading it."""
        return self.slots[name].shape

    def as_stored(self, name: str) -> Packed:
        """A weight as the file holds it: its rows in the order of the file."""
        return self.source.packed(self.slots[name].source_name)

    def is_changed(self, name: str) -> bool:
        """Whether a weight has other numbers than the file, as merged ones have."""
        return False

    def stored_type(self, name: str) -> GGMLType:
        """The type in which the file stores a weight."""
        return self.as_stored(name).ggml_type

    def stored_bytes(self, name: str) -> int:
        """Bytes that a weight takes in the file."""
        return self.as_stored(name).raw.size

    def _require_products(self) -> None:
        """Refuse what llama.cpp ends the whole process at: there is no emulating that."""
        in_gguf = isinstance(self.source, GGUFFile)
        for name, slot in self.slots.items():
            kind = self.stored_type(name)
            is_matrix = len(slot.shape) == 2
            if kind not in ACTIVATION_TYPE if is_matrix else in_gguf and kind is not GGMLType.F32:
                what = "which llama.cpp has no product for" if is_matrix else "but llama.cpp takes vectors in F32 only"
                message = f"{slot.source_name} is {kind.name}, {what}; use exact numerics"
                raise FormatError("Unsupported", message, path=self.path)

    def _multiplies_itself(self, slot: Slot) -> bool:
        if len(slot.shape) != 2 or not (self.packed or self.numerics.rounds_activations):
            return False
        return self.source.packed(slot.source_name).ggml_type not in (GGMLType.F32, GGMLType.F64)

    def _matrix(self, name: str) -> Matrix:
        slot = self.slots[name]
        if slot.must_equal is not None:
            self._require_equal(slot)
        return Matrix(
            self.source.packed(slot.source_name),
            dtype=self.dtype,
            round_inputs=self.numerics.rounds_activations,
            decoded=None if self.packed else self.astype(np.float32).array(name),
            interleaved_heads=slot.interleaved_heads,
        )

    def _require_equal(self, slot: Slot) -> None:
        assert slot.must_equal is not None
        one, other = (self.source.packed(name) for name in (slot.source_name, slot.must_equal))
        same_bytes = one.ggml_type is other.ggml_type and np.array_equal(one.raw, other.raw)
        if not same_bytes and not np.array_equal(one.decode(), other.decode()):
            message = f"config ties {slot.must_equal} to {slot.source_name}, but their numbers differ"
            raise FormatError("Inconsistent", message, path=self.path)


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


def open_weights(path: str | Path) -> Weights:
    """Open a GGUF file or a Hugging Face folder and check configuration and set of tensors; none is read yet."""
    path = Path(path)
    if path.is_dir():
        return _open_huggingface(path)
    if path.suffix in PICKLE_SUFFIXES:
        raise FormatError("Unsafe", "a pickle can run code; convert the model to safetensors first", path=path)
    if path.suffix == ".safetensors":
        raise FormatError("Unsupported", "give the folder that holds config.json, not the file", path=path)
    return _open_gguf(path)


def _open_gguf(path: Path) -> Weights:
    file = open_gguf(path)
    try:
        config = _gguf_config(file)
        slots = {
            weight.name: Slot(weight.gguf, weight.shape, weight.interleaved_heads)
            for weight in inventory(config).values()
        }
        _check_tensors(slots, file, ignored={_ROPE_FACTORS}, family=config.family)
    except BaseException:
        file.close()
        raise
    return Weights(config=config, path=path, source=file, slots=slots)


def _gguf_config(file: GGUFFile) -> ModelConfig:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise FormatError("Missing", "no token_embd.weight: the file holds no model", path=file.path)
    rows = embedding.shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, StringArray) and len(tokens) != rows:
        message = f"the vocabulary has {len(tokens)} tokens, token_embd.weight has {rows} rows"
        raise FormatError("Inconsistent", message, path=file.path)
    factors = file.array(_ROPE_FACTORS).reshape(-1) if _ROPE_FACTORS in file.tensors else None
    names = file.tensors.keys()
    return ModelConfig.from_gguf(
        file.metadata, tensor_names=names, vocab_size=rows, rope_factors=factors, path=file.path
    )


def _open_huggingface(path: Path) -> Weights:
    values = read_json(file_inside(path, "config.json"), limit=_MAX_CONFIG)
    if "auto_map" in values:
        logger.warning("%s: config.json names custom code (auto_map), which is not run", path)
    config = ModelConfig.from_huggingface(values, path=path / "config.json")
    folder = SafetensorsFolder(path)
    try:
        slots = {weight.name: Slot(weight.huggingface, weight.shape) for weight in inventory(config).values()}
        ignored = {name for name in folder.tensors if name.endswith(".rotary_emb.inv_freq")}
        if config.tie_word_embeddings and "lm_head.weight" in folder.tensors:
            embedding = slots["embed_tokens"]
            slots["embed_tokens"] = Slot(embedding.source_name, embedding.shape, must_equal="lm_head.weight")
            ignored.add("lm_head.weight")
        _check_tensors(slots, folder, ignored=ignored, family=config.family)
    except BaseException:
        folder.close()
        raise
    return Weights(config=config, path=path, source=folder, slots=slots)


def _check_tensors(
    slots: Mapping[str, Slot], source: GGUFFile | SafetensorsFolder, *, ignored: set[str], family: str
) -> None:
    wanted = {slot.source_name: slot for slot in slots.values()}
    found = source.tensors
    both = sorted(wanted.keys() & found.keys())
    faults: dict[ErrorCode, list[str]] = {
        "Missing": sorted(wanted.keys() - found.keys()),
        "Unexpected": sorted(found.keys() - wanted.keys() - ignored),
        "Shape": [
            f"{name} expected {wanted[name].shape} got {found[name].shape}"
            for name in both
            if wanted[name].shape != found[name].shape
        ],
        "DType": [f"{name} holds integers" for name in both if not found[name].holds_floats],
    }
    bad: list[tuple[ErrorCode, list[str]]] = [(code, names) for code, names in faults.items() if names]
    if bad:
        lists = "; ".join(f"{len(names)} {code}: {', '.join(names)}" for code, names in bad)
        message = f"weights: expected the {len(wanted)} tensors of this {family} configuration, got {lists}"
        raise FormatError(bad[0][0], message, path=source.path)
