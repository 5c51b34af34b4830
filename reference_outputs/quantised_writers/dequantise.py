"""Dequantise the folders with independent libraries, for the goldens.

`llorch.engines.dequantisers` calls the libraries that `llorch verify` uses. The functions here call libraries that only
goldens need. Each takes a folder and returns float weights by their Hugging Face name. The functions only load files
and call a library: they hold no formula of a format. They cast factors to float32 or float64 before the call where the
library computes in the dtype of the factor, so that the library rounds once.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from llorch.engines.dequantisers import all_dequantised
from quantised_writers import by_libraries
from quantised_writers.base import config, float_tensors, write

Weights = dict[str, torch.Tensor]


class Dequantiser(NamedTuple):
    """Library that reads some of the folders, and the dtype to which it rounds its values."""

    run: Callable[[Path], Weights]
    packages: tuple[str, ...]  # with a version if only that one reads the folder: "compressed-tensors==0.12.2"
    function: str
    rounds_to: str = "float32"
    note: str = ""


def settings(folder: Path) -> dict[str, Any]:
    """Read config.json."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def modules(folder: Path, ending: str) -> dict[str, Weights]:
    """Return the tensors of every module that has a tensor with this ending, by module and ending."""
    tensors = load_file(folder / "model.safetensors")
    names = [name.removesuffix(f".{ending}") for name in tensors if name.endswith(f".{ending}")]
    return {n: {k.removeprefix(f"{n}."): t for k, t in tensors.items() if k.startswith(f"{n}.")} for n in names}


def gptqmodel_file(folder: Path) -> Weights:
    """Call gptqmodel's export to dense weights."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel.utils.model_dequant import convert_gptq_file

    quantisation = settings(folder)["quantization_config"]
    weights = convert_gptq_file(folder / "model.safetensors", torch.float32, quantisation, "cpu")
    return {f"{name}.weight": weights[f"{name}.weight"] for name in modules(folder, "qweight")}


def autoawq_quantiser(folder: Path) -> Weights:
    """Let AutoAWQ quantise the float weights of a folder again, and return the numbers that it packs."""
    size, group = by_libraries.FOLDERS[folder.name][0], settings(folder)["quantization_config"]["group_size"]
    with TemporaryDirectory() as temporary:
        write(Path(temporary), config(size), float_tensors(size))
        return by_libraries.autoawq_model(Path(temporary), group)[1]


def autoround(folder: Path) -> Weights:
    """Multiply the identity by AutoRound's own module, with scales in float32."""
    from auto_round_extension.torch.qlinear_torch import QuantLinear  # pyright: ignore[reportMissingImports]

    quantisation, weights = settings(folder)["quantization_config"], {}
    for name, tensors in modules(folder, "qweight").items():
        width = tensors["qweight"].shape[0] * 32 // quantisation["bits"]
        shape = (width, tensors["scales"].shape[1])
        module: Any = QuantLinear(quantisation["bits"], quantisation["group_size"], *shape, bias=False)
        module.load_state_dict(tensors, strict=False)
        module.scales = module.scales.float()
        with torch.no_grad():
            weights[f"{name}.weight"] = module(torch.eye(width)).T
    return weights


def llamacpp(folder: Path) -> Weights:
    """Call `dequant_model` of llama.cpp's converter, from the sources at LLORCH_LLAMACPP."""
    root = os.environ["LLORCH_LLAMACPP"]
    sys.path[:0] = [root, f"{root}/gguf-py"]
    import conversion
    from conversion.base import ModelBase
    from gguf import LlamaFileType

    kind: Any = conversion.get_model_class("LlamaForCausalLM")
    hparams = ModelBase.load_hparams(folder, False)
    model = kind(folder, LlamaFileType.ALL_F32, folder / "unused.gguf", eager=True, hparams=hparams)
    quantised = {name for name in model.model_tensors if "_proj." in name}
    model.dequant_model()
    return {name: load().float() for name, load in model.model_tensors.items() if "_proj.weight" in name and quantised}


def gptqmodel_fp8(folder: Path) -> Weights:
    """Call gptqmodel's export of FP8 files with a factor per output."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel.utils.model_dequant import convert_fp8_shard
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as reader:
        weights = convert_fp8_shard(reader, torch.float32, block_shape=None)
    return {name: weight for name, weight in weights.items() if "_proj.weight" in name}


def modelopt_nvfp4(folder: Path) -> Weights:
    """Call ModelOpt's own tensor class."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    weights = {}
    for name, t in modules(folder, "weight_scale_2").items():
        shape = torch.Size((t["weight"].shape[0], t["weight"].shape[1] * 2))
        tensor = NVFP4QTensor(shape, torch.float32, t["weight"])
        factors = {"scale": t["weight_scale"], "double_scale": t["weight_scale_2"]}
        weights[f"{name}.weight"] = tensor.dequantize(torch.float32, fast=False, block_sizes={-1: 16}, **factors)
    return weights


def transformers_mxfp4(folder: Path) -> Weights:
    """Call transformers' dequantiser of gpt-oss; it returns [experts, inputs, outputs]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = load_file(folder / "model.safetensors")
    names = [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]
    packed_tensors = {name: (tensors[f"{name}_blocks"], tensors[f"{name}_scales"]) for name in names}
    return {name: convert_moe_packed_tensors(*packed, dtype=torch.float32) for name, packed in packed_tensors.items()}


def older_compressed_tensors(folder: Path) -> Weights:
    """Call a compressor that still knows `weight_g_idx` and 10 codes of 3 bits per word."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs

    group = settings(folder)["quantization_config"]["config_groups"]["group_0"]["weights"]
    arguments, weights = QuantizationArgs.model_validate(group), {}
    compressor = PackedQuantizationCompressor()
    for name, tensors in modules(folder, "weight_packed").items():
        exact = {key: t.double() if t.dtype == torch.bfloat16 else t for key, t in tensors.items()}
        weights[f"{name}.weight"] = compressor.decompress_weight(exact, arguments)
    return weights


GPTQ = Dequantiser(gptqmodel_file, ("gptqmodel",), "utils.model_dequant.convert_gptq_file")
AWQ = Dequantiser(all_dequantised, ("autoawq",), "utils.packing_utils.dequantize_gemm, scales cast to float32")
LLAMACPP = Dequantiser(llamacpp, ("llama.cpp",), "conversion/base.py dequant_model")
COMPRESSED = Dequantiser(all_dequantised, ("compressed-tensors==0.20.0",), "decompress, scales cast to float64")
OLDER = Dequantiser(
    older_compressed_tensors, ("compressed-tensors==0.12.2",), "decompress_weight, scales cast to float64"
)
BITSANDBYTES = Dequantiser(
    all_dequantised,
    ("bitsandbytes",),
    "backends.default.ops, float32",
    note="functional.dequantize_4bit is wrong on a CPU if K is no multiple of 64 (here down_proj of nf4 and fp4)",
)
MLX = Dequantiser(all_dequantised, ("mlx",), "mx.dequantize, affine scales and biases cast to float32")
TORCHAO = Dequantiser(all_dequantised, ("torchao",), "Tensor.dequantize(float32)")

BY_NAME: dict[str, Dequantiser] = {  # the first row whose key begins the name of the folder
    "gptq-4bit-partial-group": Dequantiser(all_dequantised, ("gptqmodel",), "TorchLinear.dequantize_weight, float32"),
    "gptq": GPTQ,
    "auto-round-gptq": GPTQ,
    "awq-gemm": AWQ,
    "awq-gemv": Dequantiser(
        autoawq_quantiser, by_libraries.AUTOAWQ, "AwqQuantizer.pseudo_quantize_tensor of the same float weights",
        rounds_to="float16",
        note="AutoAWQ and gptqmodel read gemv files in CUDA kernels only; these are the numbers that AutoAWQ packed",
    ),
    "auto-round-awq": AWQ,
    "auto-round-2bit-asym": Dequantiser(
        autoround, ("auto-round",), "auto_round_extension.torch.qlinear_torch.QuantLinear of the identity, float32"
    ),
    "fp8": LLAMACPP,
    "mxfp8": Dequantiser(
        all_dequantised, ("transformers",), "integrations.finegrained_fp8.Fp8Dequantize, float32"
    ),
    "fbgemm": Dequantiser(gptqmodel_fp8, ("gptqmodel",), "utils.model_dequant.convert_fp8_shard"),
    "modelopt-nvfp4": Dequantiser(
        modelopt_nvfp4, ("nvidia-modelopt",), "NVFP4QTensor.dequantize",
        note="two roundings: weight_scale * weight_scale_2 in float32, then times the E2M1 number",
    ),
    "modelopt-fp8": LLAMACPP,
    "gpt-oss-mxfp4": Dequantiser(
        transformers_mxfp4, ("transformers",), "integrations.mxfp4.convert_moe_packed_tensors, float32",
        note="each tensor is [experts, inputs, outputs]",
    ),
    "bitnet-autobitlinear": Dequantiser(all_dequantised, ("transformers",), "AutoBitLinear of the identity"),
    "bitnet-bitlinear": LLAMACPP,
    "ct-w4a16-weight-g-idx": OLDER,
    "ct-w3a16-ten-per-word": OLDER,
    "ct-nvfp4": COMPRESSED._replace(function="unpack_fp4_from_uint8 and dequantize in float64"),
    "ct-": COMPRESSED,
    "bnb-int8": Dequantiser(
        all_dequantised, ("bitsandbytes",), "functional.int8_vectorwise_dequant",
        note="two roundings: code * SCB in float32, then times 7.874015718698502e-3",
    ),
    "bnb": BITSANDBYTES,
    "mlx": MLX,
    "torchao": TORCHAO,
}  # fmt: skip


def row_of(name: str) -> Dequantiser:
    """Return the dequantiser of a folder."""
    return next(row for key, row in BY_NAME.items() if name.startswith(key))
