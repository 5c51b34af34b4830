"""Weights of a quantised folder, decoded by the library of its method, for comparison with llorch's readers.

Each function loads a file and calls a library; none contains the formula of a format. If a library computes in the
dtype of the scales, they are cast to float32 or float64 first, so that the library rounds only once, to float32. A
`matrix(name)` function inside decodes the weight of one module, (out, in).
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import files
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from llorch.files.quantised.folder import settings_of
from llorch.files.strict_json import read_settings

Tensors = dict[str, torch.Tensor]
Matrix = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Library:
    """Package that decodes the matrices of a method; `opened` returns decode functions by weight name."""

    package: str
    module: str  # name to import
    opened: Callable[["Folder"], Mapping[str, Matrix]]


class Folder:
    """Tensors and settings of a folder, read by the safetensors package."""

    def __init__(self, path: Path) -> None:
        """Open all files of the folder."""
        self.path = path
        self.config: dict[str, Any] = read_settings(path / "config.json")
        opened = [safe_open(file, framework="pt") for file in sorted(path.glob("*.safetensors"))]
        self._files = {name: file for file in opened for name in file.keys()}

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the method, from config.json or a separate file."""
        pair = settings_of(self.config, self.path)
        return {} if pair is None else dict(pair[1].values)

    @property
    def library(self) -> str:
        """Key in `LIBRARIES`: the method, and the layout of the tensors if the method has several."""
        pair = settings_of(self.config, self.path)
        method, settings = ("", {}) if pair is None else (pair[0].removeprefix("intel/"), pair[1].values)
        layout = next((str(settings[key]) for key in _LAYOUTS.get(method, ()) if settings.get(key)), "")
        # With this layout the key is not in LIBRARIES, so that no library decodes the folder.
        layout = "regular expressions" if self._has_expressions(self.settings.get("extra_config") or {}) else layout
        return f"{method} {layout.lower()}".rstrip()

    def _has_expressions(self, extra: Mapping[str, Any]) -> bool:
        """Check if a regular expression of AutoRound, which no library here supports, applies to a module."""
        modules = [module for module in self.modules("qweight") if module not in extra]
        return any(re.search(key, module) for key, changes in extra.items() if changes for module in modules)

    def modules(self, ending: str) -> list[str]:
        """List the modules that have a tensor `<module>.<ending>`."""
        return [name.removesuffix(f".{ending}") for name in self._files if name.endswith(f".{ending}")]

    def tensors(self, module: str) -> Tensors:
        """Read the tensors of a module; keys are their names after the module's."""
        names = [name for name in self._files if name.startswith(f"{module}.")]
        return {name.removeprefix(f"{module}."): self._files[name].get_tensor(name) for name in names}


def dequantised(path: str, name: str) -> np.ndarray | None:
    """Decode one matrix of a folder, by weight name, to float32; None if the library has no matrix of this name."""
    matrix = _open_matrices(path).get(name)
    with torch.no_grad():
        return None if matrix is None else matrix().float().contiguous().numpy()


def all_dequantised(path: Path) -> Tensors:
    """Decode all matrices of a folder, by weight name."""
    with torch.no_grad():
        return {name: matrix() for name, matrix in _open_matrices(str(path)).items()}


def missing(path: str) -> str | None:
    """Return the package to install for a folder: "" if no library is known, None if it is installed."""
    library = LIBRARIES.get(Folder(Path(path)).library)
    if library is None:
        return ""
    return None if find_spec(library.module) else library.package


def package(path: str) -> str:
    """Return the package that decodes a folder; call `missing` first."""
    return LIBRARIES[Folder(Path(path)).library].package


@cache
def _open_matrices(path: str) -> Mapping[str, Matrix]:
    folder = Folder(Path(path))
    return LIBRARIES[folder.library].opened(folder)


def _gptqmodel(folder: Folder) -> Mapping[str, Matrix]:
    """Call gptqmodel's torch module, which computes a default for a missing g_idx (the group of each input)."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear  # pyright: ignore[reportMissingImports]
    from gptqmodel.quantization.config import dynamic_get  # pyright: ignore[reportMissingImports]
    from gptqmodel.utils.model import (  # pyright: ignore[reportMissingImports]
        convert_gptq_v1_to_v2_format_module,
    )

    settings = folder.settings
    keys = ("bits", "group_size", "desc_act", "sym")
    defaults = {"desc_act": False, "sym": True}  # AutoRound writes no desc_act
    version = settings.get("checkpoint_format") or settings.get("format") or "gptq"  # gptq is version 1

    def matrix(name: str) -> torch.Tensor:
        tensors = folder.tensors(name)
        changes = dynamic_get(settings.get("dynamic"), name) or (settings.get("extra_config") or {}).get(name) or {}
        merged = {**settings, **{key: value for key, value in changes.items() if value is not None}}
        arguments = defaults | {key: merged[key] for key in keys if merged.get(key) is not None}
        n_in, n_out = tensors["qweight"].shape[0] * 32 // arguments["bits"], tensors["scales"].shape[1]
        module: Any = TorchLinear(**arguments, in_features=n_in, out_features=n_out, bias=False, pack_dtype=torch.int32)
        module.load_state_dict(tensors, strict=False)
        if version == "gptq":
            convert_gptq_v1_to_v2_format_module(module, arguments["bits"], torch.int32)
        module.post_init()
        module.scales = module.scales.float()
        return module.dequantize_weight().T

    return _by_weight_name(folder.modules("qweight"), matrix)


def _autoawq(folder: Folder) -> Mapping[str, Matrix]:
    """Call AutoAWQ's 4-bit function; the package does not import with transformers 5, so only its file is loaded."""
    packing = _import_file("autoawq", "utils/packing_utils.py")

    def matrix(name: str) -> torch.Tensor:
        tensors = folder.tensors(name)
        group = len(tensors["qweight"]) // len(tensors["scales"])
        return packing.dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"].float(), 4, group).T

    return _by_weight_name(folder.modules("qweight"), matrix)


def _import_file(package: str, ending: str) -> ModuleType:
    """Import one file of a package as a module."""
    path = next(file.locate() for file in files(package) or () if str(file).endswith(ending))
    spec = spec_from_file_location(Path(ending).stem, str(path))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compressed_tensors(folder: Folder) -> Mapping[str, Matrix]:
    """Call the compressor that compressed-tensors selects for each module, with scales in float64."""
    from compressed_tensors.compressors import BaseCompressor  # pyright: ignore[reportMissingImports]
    from compressed_tensors.quantization import (  # pyright: ignore[reportMissingImports]
        QuantizationConfig,
        apply_quantization_config,
    )
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {key: value for key, value in folder.config.items() if key not in ("quantization_config", "model_type")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(folder.config["model_type"], **config))
    quantization = QuantizationConfig.model_validate(folder.settings)
    apply_quantization_config(model, quantization)
    schemes = {name: getattr(module, "quantization_scheme", None) for name, module in model.named_modules()}

    def matrix(name: str) -> torch.Tensor:
        scheme: Any = schemes[name]
        form = scheme.format or quantization.format
        form = str(getattr(form, "value", form))
        tensors = folder.tensors(name)
        if form == "nvfp4-pack-quantized":  # its decompress would compute in bfloat16
            return _compressed_nvfp4(tensors, scheme)
        exact = {key: t.double() if t.dtype in (torch.bfloat16, torch.float16) else t for key, t in tensors.items()}
        decompress: Any = BaseCompressor.get_value_from_registry(form).decompress
        return decompress(exact, scheme)["weight"]

    names = dict.fromkeys(folder.modules("weight_scale") + folder.modules("weight_packed"))
    return _by_weight_name([name for name in names if schemes.get(name) is not None], matrix)


def _compressed_nvfp4(tensors: Tensors, scheme: Any) -> torch.Tensor:
    """Call the two functions that compressed-tensors' decompress calls, but in float64."""
    from compressed_tensors.compressors.nvfp4.helpers import (  # pyright: ignore[reportMissingImports]
        unpack_fp4_from_uint8,
    )
    from compressed_tensors.quantization.lifecycle.forward import (  # pyright: ignore[reportMissingImports]
        dequantize,
    )

    packed = tensors["weight_packed"]
    codes = unpack_fp4_from_uint8(packed, packed.shape[0], packed.shape[1] * 2, dtype=torch.float64)
    scale, global_scale = (tensors[f"weight_{key}"].double() for key in ("scale", "global_scale"))
    return dequantize(codes, scale, args=scheme.weights, dtype=torch.float64, global_scale=global_scale)


def _bitsandbytes(folder: Folder) -> Mapping[str, Matrix]:
    """Call bitsandbytes' torch dequantiser; its compiled CPU version is wrong for row lengths not divisible by 64."""
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.functional import QuantState, dequantize_blockwise, int8_vectorwise_dequant

    def four_bits(name: str) -> torch.Tensor:
        tensors = folder.tensors(name)
        packed = tensors.pop("weight")
        state: Any = QuantState.from_dict(tensors, torch.device("cpu"))
        absmax = dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
        codes = packed.reshape(-1)
        return _dequantize_4bit_compute(codes, absmax, state.code, state.blocksize, state.shape, torch.float32)

    def eight_bits(name: str) -> torch.Tensor:
        tensors = folder.tensors(name)
        return int8_vectorwise_dequant(tensors["weight"], tensors["SCB"])

    four = _by_weight_name(folder.modules("weight.quant_map"), four_bits)
    return {**four, **_by_weight_name(folder.modules("SCB"), eight_bits)}


def _mlx(folder: Folder) -> Mapping[str, Matrix]:
    """Call `mx.dequantize`, with affine scales in float32; split a stack into one matrix for each expert."""
    import mlx.core as mx  # pyright: ignore[reportMissingImports]

    loaded: dict[str, Any] = {}
    for file in sorted(folder.path.glob("*.safetensors")):
        loaded |= mx.load(str(file))

    def matrix(name: str) -> torch.Tensor:
        merged = folder.settings | folder.settings.get(name, {})
        arguments = {key: merged.get(key) for key in ("group_size", "bits", "mode")}
        scales = [loaded[f"{name}.{key}"] for key in ("scales", "biases") if f"{name}.{key}" in loaded]
        scales = [scale.astype(mx.float32) for scale in scales] if len(scales) == 2 else scales
        decoded = mx.dequantize(loaded[f"{name}.weight"], *scales, **arguments).astype(mx.float32)
        return torch.from_numpy(np.array(decoded))

    decoded: dict[str, Matrix] = {}
    for module in folder.modules("scales"):
        if loaded[f"{module}.weight"].ndim == 2:
            decoded |= _by_weight_name([module], matrix)
            continue
        for expert in range(loaded[f"{module}.weight"].shape[0]):
            expert_name = module.replace(".switch_mlp.", f".experts.{expert}.")
            decoded[f"{expert_name}.weight"] = lambda module=module, expert=expert: matrix(module)[expert]
    return decoded


def _torchao(folder: Folder) -> Mapping[str, Matrix]:
    """Load through transformers, and call `dequantize` of each tensor."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder.path, local_files_only=True, dtype=torch.bfloat16)
    parameters: dict[str, Any] = dict(model.named_parameters())
    quantised = {name: parameter.data for name, parameter in parameters.items() if hasattr(parameter.data, "qdata")}
    return {name: lambda data=data: data.dequantize(torch.float32) for name, data in quantised.items()}


def _bitnet(folder: Folder) -> Mapping[str, Matrix]:
    """Multiply the identity by transformers' AutoBitLinear, whose quantisation of activations is exact for 0 and 1."""
    from transformers.integrations.bitnet import AutoBitLinear, unpack_weights

    def matrix(name: str) -> torch.Tensor:
        tensors = folder.tensors(name)
        rows, width = tensors["weight"].shape[0] * 4, tensors["weight"].shape[1]
        module: Any = AutoBitLinear(width, rows, bias=False)
        with torch.compiler.set_stance("force_eager"):
            module.weight.copy_(unpack_weights(tensors["weight"], dtype=torch.float32))
            module.weight_scale = tensors["weight_scale"].float()
            return module(torch.eye(width)).T

    return _by_weight_name(folder.modules("weight_scale"), matrix)


def _mxfp8(folder: Folder) -> Mapping[str, Matrix]:
    """Call transformers' FP8 dequantiser, which derives the block size, here 32 columns, from the shapes."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    dequantise = Fp8Dequantize(None)._dequantize_one

    def matrix(name: str) -> torch.Tensor:
        tensors = folder.tensors(name)
        return dequantise(tensors["weight"], tensors["weight_scale_inv"], torch.float32)

    return _by_weight_name(folder.modules("weight_scale_inv"), matrix)


def _by_weight_name(modules: list[str], matrix: Callable[[str], torch.Tensor]) -> Mapping[str, Matrix]:
    """Map the name of each module's weight to a function that decodes its matrix."""
    return {f"{module}.weight": lambda module=module: matrix(module) for module in modules}


_LAYOUTS: Mapping[str, tuple[str, ...]] = {  # method -> settings that name the layout
    "auto-round": ("packing_format",), "bitnet": ("linear_class",), "awq": ("version", "format"),
}  # fmt: skip
_GPTQ, _AWQ = Library("gptqmodel", "gptqmodel", _gptqmodel), Library("autoawq", "awq", _autoawq)
LIBRARIES: Mapping[str, Library] = {
    "compressed-tensors": Library("compressed-tensors", "compressed_tensors", _compressed_tensors),
    "bitsandbytes": Library("bitsandbytes", "bitsandbytes", _bitsandbytes),
    "gptq": _GPTQ,
    "auto-round": _GPTQ,
    "auto-round auto_round:auto_gptq": _GPTQ,
    "awq": _AWQ,
    "awq gemm": _AWQ,  # AutoAWQ reads gemv in CUDA kernels only
    "auto-round auto_round:auto_awq": _AWQ,
    "mlx": Library("mlx", "mlx", _mlx),
    "torchao": Library("torchao", "torchao", _torchao),
    "mxfp8": Library("transformers", "transformers", _mxfp8),
    "bitnet autobitlinear": Library("transformers", "transformers", _bitnet),
}
