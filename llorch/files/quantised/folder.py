"""A quantised Hugging Face folder: which method wrote it, and its matrices in place of their tensors."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from llorch.files.folder import SafetensorsFolder, file_inside
from llorch.files.mapped import on_error
from llorch.files.packed import Packed
from llorch.files.quantised.activations import Activations, read_activations
from llorch.files.quantised.bitsandbytes import read_bitsandbytes
from llorch.files.quantised.compressed_tensors import read_compressed_tensors
from llorch.files.quantised.float8 import read_fbgemm, read_fp8
from llorch.files.quantised.gptq import read_awq, read_gptq
from llorch.files.quantised.matrix import QuantisedMatrix, StoredPart
from llorch.files.quantised.others import read_auto_round, read_bitnet, read_mlx, read_modelopt, read_torchao
from llorch.files.quantised.source import Found, Source
from llorch.files.safetensors import SafetensorsInfo
from llorch.files.strict_json import read_json
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields

logger = logging.getLogger(__name__)

_MLX = "mlx"  # its settings name no method
METHODS: Mapping[str, Callable[[Source], None]] = {
    "gptq": read_gptq,
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "mxfp8": read_fp8,
    "fbgemm_fp8": read_fbgemm,
    "bitsandbytes": read_bitsandbytes,
    "modelopt": read_modelopt,
    "auto-round": read_auto_round,
    "intel/auto-round": read_auto_round,
    "bitnet": read_bitnet,
    "torchao": read_torchao,
    _MLX: read_mlx,
}
SETTINGS = ("quantization_config", "quantization")  # keys of config.json
# Files of writers that leave config.json alone.
_BESIDE = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_LIMIT = 1 << 22


def settings_of(values: Mapping[str, object], folder: Path) -> tuple[str, Fields] | None:
    """Read the method of a folder and its settings, in config.json or a file next to it; None if nothing is quantised.

    FormatError: Unsupported for a method that llorch does not read, Malformed for settings that are no object.
    """
    path = folder / "config.json"
    if isinstance(values.get("quantization"), Mapping):
        return _MLX, Fields(values, path).section("quantization") or Fields({}, path)
    text = values.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, Mapping) else None
    settings = Fields({"quantization_config": inner, **values}, path).section("quantization_config")
    settings = settings or _beside(folder)
    if settings is None:
        return None
    method = settings.text("quant_method")
    if method not in METHODS:
        message = f"quant_method: expected one of {', '.join(METHODS)}, got {method!r}"
        raise FormatError("Unsupported", f"{message}; use the folder before its quantisation", path=settings.path)
    return method, settings


def _beside(folder: Path) -> Fields | None:
    """Read the settings of a file next to config.json, with the keys that config.json would have."""
    for name in _BESIDE:
        if not (folder / name).exists():
            continue
        values = read_json(file_inside(folder, name), limit=_LIMIT)
        own = values.get("quantization")
        values = {"quant_method": "modelopt", **own} if isinstance(own, dict) else values
        default = "awq" if "w_bit" in values or "zero_point" in values else "gptq"
        return Fields({"quant_method": default, **values}, folder / name)
    return None


def is_quantised(values: Mapping[str, object], folder: Path) -> bool:
    """Tell if the folder of these settings is quantised; FormatError as `settings_of`."""
    return settings_of(values, folder) is not None


class QuantisedFolder(SafetensorsFolder):
    """The weights of a quantised folder; `tensors` has its matrices, `stored` the tensors of its files."""

    def __init__(self, path: str | Path, values: Mapping[str, object]) -> None:
        """Open the folder of a config.json and find its matrices; FormatError, with key and tensor, if one is wrong."""
        super().__init__(path)
        with on_error(self.close):
            made = settings_of(values, self.path)
            assert made is not None
            self.method, settings = made
            self.source = Source(settings, self.stored, self._part)
            METHODS[self.method](self.source)
            if not self.source.found:
                message = f"quant_method {self.method}: expected quantised tensors, got none"
                raise FormatError("Inconsistent", message, path=settings.path)
        self.tensors = self._matrices() | self._floats()
        if scales := sorted(self.source.unused & {name for name in self.stored if name.endswith("_scale")}):
            logger.info("%s: %d scales that exact numerics leave out, as %s", path, len(scales), scales[0])

    @property
    def matrices(self) -> Mapping[str, Found]:
        """The matrices that the reader of the method found, by the name of the weight."""
        return self.source.found

    def _matrices(self) -> dict[str, SafetensorsInfo]:
        infos = {}
        for name, found in self.source.found.items():
            n_bytes = sum(self.stored[part].n_bytes for part in found.parts.values()) // (found.expert or (0, 1))[1]
            infos[name] = SafetensorsInfo(name, found.shape, 0, n_bytes, found.scheme.name)
        return infos

    def _floats(self) -> dict[str, SafetensorsInfo]:
        """Return the tensors that belong to no quantised matrix."""
        parts = {part for found in self.source.found.values() for part in found.parts.values()}
        return {name: info for name, info in self.stored.items() if name not in parts | self.source.unused}

    def _part(self, name: str) -> StoredPart:
        info = self.stored[name]
        return StoredPart(name, info.dtype, info.shape, self.raw(name))

    def array(self, name: str) -> np.ndarray:
        """Read a tensor or a matrix as float32; a matrix is decoded and its scales are looked at."""
        if name not in self.source.found:
            return super().array(name)
        matrix = self.packed(name)
        matrix.require_scales()
        return matrix.decode()

    def packed(self, name: str) -> Packed:
        """Look at a tensor or a matrix as it is stored."""
        found = self.source.found.get(name)
        return super().packed(name) if found is None else self._matrix(name, found)

    def _matrix(self, name: str, found: Found) -> QuantisedMatrix:
        parts = {role: _of_expert(self._part(part), found.expert) for role, part in found.parts.items()}
        first = next(iter(parts.values()))
        return QuantisedMatrix(name, self.path, first.raw, found.scheme, found.shape, parts, found.recipe)

    @cached_property
    def activations(self) -> Activations:
        """The roundings of activations that the settings ask for; FormatError as `read_activations`."""
        return read_activations(self.method, self.source)

    def require_whole(self, name: str) -> None:
        """Refuse to go on with a tensor whose file was cut since; of a matrix, with its tensors."""
        found = self.source.found.get(name)
        for part in [name] if found is None else found.parts.values():
            super().require_whole(part)


def _of_expert(part: StoredPart, expert: tuple[int, int] | None) -> StoredPart:
    """Take the bytes of one expert out of a stack."""
    if expert is None:
        return part
    number, count = expert
    return replace(part, shape=part.shape[1:], raw=part.raw.reshape(count, -1)[number])
