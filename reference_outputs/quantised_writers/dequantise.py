"""Dequantise the folders with independent libraries, for the goldens.

Each function takes a folder and returns float weights by their Hugging Face name. The functions only load files and
call a library: they hold no formula of a format. They cast factors to float32 or float64 before the call where the
library computes in the dtype of the factor, so that the library rounds once.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

Weights = dict[str, torch.Tensor]


class Dequantiser(NamedTuple):
    """Library that reads some of the folders, and the dtype that it rounds its result to."""

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


def gptqmodel_module(folder: Path) -> Weights:
    """Call gptqmodel's torch module, which has a default for a missing g_idx."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    quantisation, weights = settings(folder)["quantization_config"], {}
    chosen = {key: quantisation[key] for key in ("bits", "group_size", "desc_act", "sym")}
    for name, tensors in modules(folder, "qweight").items():
        width = tensors["qweight"].shape[0] * 32 // chosen["bits"]
        module: Any = TorchLinear(
            **chosen, in_features=width, out_features=tensors["scales"].shape[1], bias=False, pack_dtype=torch.int32
        )
        module.load_state_dict(tensors, strict=False)
        convert_gptq_v1_to_v2_format_module(module, chosen["bits"], torch.int32)
        module.post_init()
        module.scales = module.scales.float()
        weights[f"{name}.weight"] = module.dequantize_weight().T
    return weights


def autoawq(folder: Path) -> Weights:
    """Call AutoAWQ's reference."""
    from awq.utils.packing_utils import dequantize_gemm

    group = settings(folder)["quantization_config"]["group_size"]
    return {
        f"{name}.weight": dequantize_gemm(t["qweight"], t["qzeros"], t["scales"].float(), 4, group).T
        for name, t in modules(folder, "qweight").items()
    }


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
    chosen = {name: (tensors[f"{name}_blocks"], tensors[f"{name}_scales"]) for name in names}
    return {name: convert_moe_packed_tensors(*each, dtype=torch.float32) for name, each in chosen.items()}


def transformers_autobitlinear(folder: Path) -> Weights:
    """Multiply the identity by transformers' AutoBitLinear; its quantisation of activations keeps 0 and 1."""
    from transformers.integrations.bitnet import AutoBitLinear, unpack_weights

    weights = {}
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for name, t in modules(folder, "weight_scale").items():
            rows, width = t["weight"].shape[0] * 4, t["weight"].shape[1]
            module: Any = AutoBitLinear(width, rows, bias=False)
            module.weight.copy_(unpack_weights(t["weight"], dtype=torch.float32))
            module.weight_scale = t["weight_scale"].float()
            weights[f"{name}.weight"] = module(torch.eye(width)).T
    return weights


def compressed_tensors(folder: Path) -> Weights:
    """Call the compressor that compressed-tensors chooses for each module, with factors in float64."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from transformers import AutoConfig, AutoModelForCausalLM

    whole = settings(folder)
    plain = {key: value for key, value in whole.items() if key not in ("quantization_config", "model_type")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(whole["model_type"], **plain))
    quantisation = QuantizationConfig.model_validate(whole["quantization_config"])
    apply_quantization_config(model, quantisation)
    tensors, weights = modules(folder, "weight_scale"), {}
    for name, module in model.named_modules():
        scheme: Any = getattr(module, "quantization_scheme", None)
        if scheme is None or not name.endswith("_proj"):
            continue
        form = str(getattr(scheme.format or quantisation.format, "value", scheme.format or quantisation.format))
        if form == "nvfp4-pack-quantized":
            weights[f"{name}.weight"] = compressed_nvfp4(tensors[name], scheme)
            continue
        exact = {key: t.double() if t.dtype == torch.bfloat16 else t for key, t in tensors[name].items()}
        decompress: Any = BaseCompressor.get_value_from_registry(form).decompress
        weights[f"{name}.weight"] = decompress(exact, scheme)["weight"]
    return weights


def compressed_nvfp4(tensors: Weights, scheme: Any) -> torch.Tensor:
    """Call the two functions of compressed-tensors' decompress in float64; decompress itself computes in BF16."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    packed = tensors["weight_packed"]
    codes = unpack_fp4_from_uint8(packed, packed.shape[0], packed.shape[1] * 2, dtype=torch.float64)
    scale, whole = (tensors[f"weight_{key}"].double() for key in ("scale", "global_scale"))
    return dequantize(codes, scale, args=scheme.weights, dtype=torch.float64, global_scale=whole)


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


def bitsandbytes_4bit(folder: Path) -> Weights:
    """Call bitsandbytes' dequantiser in torch; its compiled one for CPUs is wrong if rows are no multiple of 64."""
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.functional import QuantState, dequantize_blockwise

    weights = {}
    for name, tensors in modules(folder, "weight.quant_map").items():
        packed = tensors.pop("weight")
        state: Any = QuantState.from_dict(tensors, torch.device("cpu"))
        absmax = dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
        chosen = state.code, state.blocksize, state.shape, torch.float32
        weights[f"{name}.weight"] = _dequantize_4bit_compute(packed.reshape(-1), absmax, *chosen)
    return weights


def bitsandbytes_int8(folder: Path) -> Weights:
    """Call bitsandbytes' dequantiser of LLM.int8 rows."""
    from bitsandbytes.functional import int8_vectorwise_dequant

    return {f"{n}.weight": int8_vectorwise_dequant(t["weight"], t["SCB"]) for n, t in modules(folder, "SCB").items()}


def mlx(folder: Path) -> Weights:
    """Call `mx.dequantize` with affine factors in float32."""
    import mlx.core as mx

    whole, weights = settings(folder)["quantization"], {}
    tensors: Any = mx.load(str(folder / "model.safetensors"))
    for name in [key.removesuffix(".scales") for key in tensors if key.endswith(".scales")]:
        chosen = {key: (whole | whole.get(name, {})).get(key) for key in ("group_size", "bits", "mode")}
        factors = [tensors[f"{name}.{key}"] for key in ("scales", "biases") if f"{name}.{key}" in tensors]
        if len(factors) == 2:
            factors = [factor.astype(mx.float32) for factor in factors]
        result = mx.dequantize(tensors[f"{name}.weight"], *factors, **chosen).astype(mx.float32)
        made = torch.tensor(result.tolist())
        if made.ndim == 3:  # a stack of experts, under the names of Hugging Face
            whole_name = name.replace(".switch_mlp.", ".experts.{}.")
            weights |= {f"{whole_name.format(e)}.weight": one for e, one in enumerate(made)}
        else:
            weights[f"{name}.weight"] = made
    return weights


def torchao(folder: Path) -> Weights:
    """Load through transformers and call the tensor's own `dequantize`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    named: Any = model.named_parameters()
    return {
        name: p.data.dequantize(torch.float32) for name, p in named if hasattr(p.data, "dequantize") and "_proj" in name
    }


GPTQ = Dequantiser(gptqmodel_file, ("gptqmodel",), "utils.model_dequant.convert_gptq_file")
AWQ = Dequantiser(autoawq, ("autoawq",), "utils.packing_utils.dequantize_gemm, scales cast to float32")
LLAMACPP = Dequantiser(llamacpp, ("llama.cpp",), "conversion/base.py dequant_model")
COMPRESSED = Dequantiser(compressed_tensors, ("compressed-tensors==0.20.0",), "decompress, scales cast to float64")
OLDER = Dequantiser(
    older_compressed_tensors, ("compressed-tensors==0.12.2",), "decompress_weight, scales cast to float64"
)
BITSANDBYTES = Dequantiser(
    bitsandbytes_4bit,
    ("bitsandbytes",),
    "backends.default.ops, float32",
    note="functional.dequantize_4bit is wrong on a CPU if K is no multiple of 64 (here down_proj of nf4 and fp4)",
)
MLX = Dequantiser(mlx, ("mlx",), "mx.dequantize, affine scales and biases cast to float32")
TORCHAO = Dequantiser(torchao, ("torchao",), "Tensor.dequantize(float32)")

BY_NAME: dict[str, Dequantiser] = {  # the first row whose key begins the name of the folder
    "gptq-4bit-partial-group": Dequantiser(gptqmodel_module, ("gptqmodel",), "TorchLinear.dequantize_weight, float32"),
    "gptq": GPTQ,
    "auto-round-gptq": GPTQ,
    "awq-gemm": AWQ,
    "auto-round-awq": AWQ,
    "fp8": LLAMACPP,
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
    "bitnet-autobitlinear": Dequantiser(transformers_autobitlinear, ("transformers",), "AutoBitLinear of the identity"),
    "bitnet-bitlinear": LLAMACPP,
    "ct-w4a16-weight-g-idx": OLDER,
    "ct-w3a16-ten-per-word": OLDER,
    "ct-nvfp4": COMPRESSED._replace(function="unpack_fp4_from_uint8 and dequantize in float64"),
    "ct-": COMPRESSED,
    "bnb-int8": Dequantiser(
        bitsandbytes_int8, ("bitsandbytes",), "functional.int8_vectorwise_dequant",
        note="two roundings: code * SCB in float32, then times 7.874015718698502e-3",
    ),
    "bnb": BITSANDBYTES,
    "mlx": MLX,
    "torchao": TORCHAO,
}  # fmt: skip
WITHOUT = {"awq-gemv": "AutoAWQ and gptqmodel read gemv files in CUDA kernels only"}


def row_of(name: str) -> Dequantiser | None:
    """Return the dequantiser of a folder."""
    return next((row for key, row in BY_NAME.items() if name.startswith(key)), None)
