"""Quantised Hugging Face folder: its method, and matrices in place of their tensors."""

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

_MLX = "mlx"  # MLX settings have no method name
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
# Settings files of writers that do not change config.json.
_SETTINGS_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_LIMIT = 1 << 22  # bytes of a settings file


def settings_of(values: Mapping[str, object], folder: Path) -> tuple[str, Fields] | None:
    """Return the method and settings of a folder, from config.json or a file next to it; None if not quantised.

    FormatError: Unsupported for a method that llorch does not read, Malformed for settings that are no object.
    """
    path = folder / "config.json"
    if isinstance(values.get("quantization"), Mapping):
        return _MLX, Fields(values, path).section("quantization") or Fields({}, path)
    text = values.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, Mapping) else None
    settings = Fields({"quantization_config": inner, **values}, path).section("quantization_config")
    settings = settings or _settings_file(folder)
    if settings is None:
        return None
    method = settings.text("quant_method")
    if method not in METHODS:
        message = f"quant_method: expected one of {', '.join(METHODS)}, got {method!r}"
        raise FormatError("Unsupported", f"{message}; use the folder before its quantisation", path=settings.path)
    return method, settings


def _settings_file(folder: Path) -> Fields | None:
    """Read the settings from a file next to config.json; return them with the keys that config.json would have."""
    for name in _SETTINGS_FILES:
        if not (folder / name).exists():
            continue
        values = read_json(file_inside(folder, name), limit=_LIMIT)
        modelopt_settings = values.get("quantization")
        values = {"quant_method": "modelopt", **modelopt_settings} if isinstance(modelopt_settings, dict) else values
        default = "awq" if "w_bit" in values or "zero_point" in values else "gptq"
        return Fields({"quant_method": default, **values}, folder / name)
    return None


def is_quantised(values: Mapping[str, object], folder: Path) -> bool:
    """Check if a folder is quantised; FormatError as `settings_of`."""
    return settings_of(values, folder) is not None


class QuantisedFolder(SafetensorsFolder):
    """Tensors of a quantised folder; `tensors` has its matrices, `stored` the tensors of its files."""

    def __init__(self, path: str | Path, values: Mapping[str, object]) -> None:
        """Open the folder of a config.json and find its matrices; FormatError, with key and tensor, if one is wrong."""
        super().__init__(path)
        with on_error(self.close):
            method_and_settings = settings_of(values, self.path)
            assert method_and_settings is not None
            self.method, settings = method_and_settings
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
        """Matrices of the folder, by weight name."""
        return self.source.found

    def _matrices(self) -> dict[str, SafetensorsInfo]:
        infos = {}
        for name, matrix in self.source.found.items():
            n_bytes = sum(self.stored[part].n_bytes for part in matrix.parts.values()) // (matrix.expert or (0, 1))[1]
            infos[name] = SafetensorsInfo(name, matrix.shape, 0, n_bytes, matrix.scheme.name)  # 0: no single offset
        return infos

    def _floats(self) -> dict[str, SafetensorsInfo]:
        """Return the tensors that belong to no quantised matrix."""
        parts = {part for matrix in self.source.found.values() for part in matrix.parts.values()}
        return {name: info for name, info in self.stored.items() if name not in parts | self.source.unused}

    def _part(self, name: str) -> StoredPart:
        info = self.stored[name]
        return StoredPart(name, info.dtype, info.shape, self.raw(name))

    def array(self, name: str) -> np.ndarray:
        """Read a tensor or a matrix as float32; the scales of a matrix are checked."""
        if name not in self.source.found:
            return super().array(name)
        matrix = self.packed(name)
        matrix.require_scales()
        return matrix.decode()

    def packed(self, name: str) -> Packed:
        """Return a stored tensor or matrix."""
        matrix = self.source.found.get(name)
        return super().packed(name) if matrix is None else self._matrix(name, matrix)

    def _matrix(self, name: str, matrix: Found) -> QuantisedMatrix:
        parts = {role: _expert_part(self._part(part), matrix.expert) for role, part in matrix.parts.items()}
        first_part = next(iter(parts.values()))
        return QuantisedMatrix(name, self.path, first_part.raw, matrix.scheme, matrix.shape, parts, matrix.recipe)

    @cached_property
    def activations(self) -> Activations:
        """Rounding of activations by the settings; FormatError as `read_activations`."""
        return read_activations(self.method, self.source)

    def require_whole(self, name: str) -> None:
        """Raise Truncated if the file of a tensor, or of a matrix's tensors, was truncated."""
        matrix = self.source.found.get(name)
        for part in [name] if matrix is None else matrix.parts.values():
            super().require_whole(part)


def _expert_part(part: StoredPart, expert: tuple[int, int] | None) -> StoredPart:
    """Return the part of one expert in a stack."""
    if expert is None:
        return part
    number, count = expert
    return replace(part, shape=part.shape[1:], raw=part.raw.reshape(count, -1)[number])
