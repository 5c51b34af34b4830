"""Write GPTQ, AWQ, FP8, ModelOpt, AutoRound, BitNet and older files: their own libraries need a GPU or a compiler."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantised_writers.base import LAYER, Config, Tensors, config, float_tensors, shapes
from quantised_writers.base import write as write_folder

Folder = tuple[Config, Tensors]
Array = NDArray[Any]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # columns that the nibbles of a word hold, lowest nibble first
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
LOW, LARGEST_FP8 = 1e-8, 448.0


def replace_weights(size: str, quantisation: Config, pack: Callable[[str, Array], Tensors], dtype: str) -> Folder:
    """Replace each Linear weight of the layer by the tensors of `pack`; the other tensors get `dtype`."""
    settings, tensors = config(size), float_tensors(size)
    settings |= {"torch_dtype": dtype, "quantization_config": quantisation}
    for name in shapes(size):
        weight = tensors.pop(f"{name}.weight").float().numpy()
        tensors |= {f"{name}.{key}": tensor for key, tensor in pack(name, weight).items()}
    cast = {key: t.to(getattr(torch, dtype)) if t.dtype == torch.bfloat16 and key in float_tensors(size) else t
            for key, t in tensors.items()}  # fmt: skip
    return settings, cast


def stream(codes: Array, bits: int) -> torch.Tensor:
    """Concatenate the codes of each row from the least significant bit, in words of 32 bits."""
    planes = np.unpackbits(codes.astype(np.uint8)[..., None], axis=-1, bitorder="little")[..., :bits]
    packed = np.packbits(planes.reshape(len(codes), -1), axis=-1, bitorder="little")
    packed = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 4)))
    return torch.from_numpy(packed.view("<i4"))


def grouped(weight: Array, group_of: Array, bits: int, *, symmetric: bool, scale_dtype: torch.dtype):
    """Return codes [N, K], scales [N, G] as `scale_dtype` holds them, and zero points [N, G]."""
    n_groups, max_code = int(group_of.max()) + 1, 2**bits - 1
    low, high = (np.stack([f(weight[:, group_of == g], axis=1) for g in range(n_groups)], 1) for f in (np.min, np.max))
    if symmetric:
        scale, zero = 2 * np.maximum(abs(low), abs(high)) / max_code, np.full(low.shape, 2.0 ** (bits - 1))
    else:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        scale = (high - low) / max_code
        zero = np.round(-low / scale)
    scales = torch.from_numpy(np.maximum(scale, LOW).astype(np.float32)).to(scale_dtype)
    codes = np.clip(np.round(weight / scales.float().numpy()[:, group_of]) + zero[:, group_of], 0, max_code)
    return codes, scales, zero


def gptq(
    bits: int, group: int, *, symmetric=True, act_order=False, version=1, size="small", g_idx=True, auto=False
) -> Folder:
    """Write GPTQ tensors: version 1 stores zero points less one modulo 2^bits, version 2 stores zero points."""
    draw, dtype = np.random.default_rng(39), "float16" if version == 1 else "bfloat16"

    def pack(name: str, weight: Array) -> Tensors:
        width = weight.shape[1]
        group_of = np.arange(width) // (group if group > 0 else width)
        group_of = group_of[draw.permutation(width)] if act_order else group_of
        codes, scales, zero = grouped(weight, group_of, bits, symmetric=symmetric, scale_dtype=getattr(torch, dtype))
        zeros = (zero.T - (version == 1)) % 2**bits
        index = {"g_idx": torch.from_numpy(group_of.astype(np.int32))} if g_idx else {}
        return {"qweight": stream(codes, bits).T, "qzeros": stream(zeros, bits), "scales": scales.T} | index

    quantisation: Config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": symmetric,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2", "pack_dtype": "int32", "damp_percent": 0.01,
        "static_groups": False, "true_sequential": True, "lm_head": False,
    }  # fmt: skip
    return replace_weights(size, auto_round(bits, group, symmetric, "auto_gptq") if auto else quantisation, pack, dtype)


def gptq_with_biases() -> Folder:
    """Write the GPTQ tensors of a Qwen2, whose q, k and v have biases."""
    settings, tensors = gptq(4, 32)
    settings |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    del settings["attention_bias"], settings["mlp_bias"], settings["head_dim"]
    draw = np.random.default_rng(41)
    for name, shape in shapes("small").items():
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            tensors[f"{name}.bias"] = torch.from_numpy(draw.normal(0, 0.1, shape[0])).to(torch.float16)
    return settings, tensors


def awq(group: int, *, size="small", auto=False) -> Folder:
    """Write AWQ gemm tensors, packed along the outputs in AWQ's order."""

    def pack(name: str, weight: Array) -> Tensors:
        width = weight.shape[1]
        group_of = np.arange(width) // group
        codes, scales, zero = grouped(weight, group_of, 4, symmetric=False, scale_dtype=torch.float16)
        ordered = lambda a: a.T.reshape(a.shape[1], -1, 8)[:, :, AWQ_ORDER].reshape(a.shape[1], -1)  # noqa: E731
        return {"qweight": stream(ordered(codes), 4), "qzeros": stream(ordered(zero), 4), "scales": scales.T}

    quantisation: Config = {
        "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None,
    }  # fmt: skip
    return replace_weights(size, auto_round(4, group, False, "auto_awq") if auto else quantisation, pack, "float16")


def auto_round(bits: int, group: int, symmetric: bool, packing: str) -> Config:
    """Return the configuration that AutoRound writes for a packing of another format."""
    return {
        "quant_method": "auto-round", "bits": bits, "group_size": group, "sym": symmetric, "data_type": "int",
        "packing_format": f"auto_round:{packing}", "block_name_to_quantize": "model.layers", "iters": 0,
        "autoround_version": "0.16.1",
    }  # fmt: skip


def to_fp8(values: Array) -> torch.Tensor:
    """Round to FP8 E4M3."""
    return torch.from_numpy(np.clip(values, -LARGEST_FP8, LARGEST_FP8)).to(torch.float8_e4m3fn)


def fp8(block: int | None, *, scale_dtype=torch.float32, static=False, size="small") -> Folder:
    """Write `quant_method: fp8`: a factor per block, also for partial blocks, or per tensor."""

    def pack(name: str, weight: Array) -> Tensors:
        rows, columns = (np.arange(length) // (block or length) for length in weight.shape)
        largest = np.zeros((rows[-1] + 1, columns[-1] + 1), np.float32)
        np.maximum.at(largest, (rows[:, None], columns[None]), abs(weight))
        scale = torch.from_numpy(largest / LARGEST_FP8).to(scale_dtype)
        quantised = to_fp8(weight / scale.float().numpy()[rows[:, None], columns[None]])
        activation = {"activation_scale": torch.tensor(0.0125)} if static else {}
        return {"weight": quantised, "weight_scale_inv": scale if block else scale[0, 0]} | activation

    quantisation: Config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "static" if static else "dynamic",
    }
    quantisation |= {"weight_block_size": [block, block]} if block else {}
    return replace_weights(size, quantisation | {"modules_to_not_convert": ["lm_head"]}, pack, "bfloat16")


def mxfp8() -> Folder:
    """Write `quant_method: mxfp8`: the exponent of a power of two for 32 columns."""

    def pack(name: str, weight: Array) -> Tensors:
        largest = abs(weight).reshape(len(weight), -1, 32).max(2)
        exponents = np.ceil(np.log2(largest / LARGEST_FP8)).astype(int)
        scale = torch.from_numpy((exponents + 127).astype(np.uint8))
        return {"weight": to_fp8(np.ldexp(weight, -np.repeat(exponents, 32, 1))), "weight_scale_inv": scale}

    quantisation: Config = {
        "quant_method": "mxfp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
        "weight_block_size": [1, 32], "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    return replace_weights("tiny", quantisation, pack, "bfloat16")


def fbgemm() -> Folder:
    """Write `fbgemm_fp8`: a factor per output."""

    def pack(name: str, weight: Array) -> Tensors:
        scale = abs(weight).max(1, keepdims=True) / LARGEST_FP8
        return {"weight": to_fp8(weight / scale), "weight_scale": torch.from_numpy(scale)}

    quantisation: Config = {
        "quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    return replace_weights("tiny", quantisation, pack, "bfloat16")


def nibbles(codes: Array) -> torch.Tensor:
    """Pack two codes per byte, the first in the low nibble."""
    codes = codes.astype(np.uint8)
    return torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)


def to_e2m1(values: Array) -> Array:
    """Return the code of the nearest E2M1 number, with the sign in bit 3."""
    nearest = abs(abs(values)[..., None] - E2M1).argmin(-1)
    return nearest + 8 * (values < 0)


def modelopt(algorithm: str) -> Folder:
    """Write ModelOpt's NVFP4 or FP8, with factors of the activations and of the KV cache."""

    def pack(name: str, weight: Array) -> Tensors:
        kind = name.rpartition(".")[2]
        cache = {f"{kind[0]}_scale": torch.tensor(0.0625 if kind[0] == "k" else 0.03125)} if kind[0] in "kv" else {}
        if algorithm == "FP8":
            scale = np.float32(abs(weight).max() / LARGEST_FP8)
            packed = {"weight": to_fp8(weight / scale), "weight_scale": torch.tensor(scale)}
            return packed | {"input_scale": torch.tensor(0.0125)} | cache
        scale2 = np.float32(abs(weight).max() / (6 * LARGEST_FP8))
        blocks = weight.reshape(len(weight), -1, 16)
        scale = to_fp8(abs(blocks).max(-1) / 6 / scale2)
        codes = to_e2m1(blocks / (np.maximum(scale.float().numpy(), LOW)[..., None] * scale2)).reshape(weight.shape)
        packed = {"weight": nibbles(codes), "weight_scale": scale, "weight_scale_2": torch.tensor(scale2)}
        return packed | {"input_scale": torch.tensor(np.float32(4.0 / (6 * LARGEST_FP8)))} | cache

    is_fp8 = algorithm == "FP8"
    numbers: Config = {"num_bits": 8 if is_fp8 else 4, "type": "float", "dynamic": False}
    numbers |= {} if is_fp8 else {"group_size": 16}
    quantisation: Config = {
        "quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"weights": numbers, "input_activations": numbers, "targets": ["Linear"]}},
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.47.0"},
    }  # fmt: skip
    return replace_weights("small", quantisation, pack, "bfloat16")


def bitnet(linear_class: str) -> Folder:
    """Write BitNet weights of 2 bits; `bitlinear` divides by the factor, `autobitlinear` multiplies by it."""

    def pack(name: str, weight: Array) -> Tensors:
        mean = abs(weight).mean()
        codes = np.clip(np.round(weight / mean), -1, 1).astype(np.int8) + 1
        packed = sum(part.astype(np.uint8) << 2 * i for i, part in enumerate(np.split(codes, 4)))
        factor = torch.tensor([mean if linear_class == "autobitlinear" else 1 / mean], dtype=torch.bfloat16)
        return {"weight": torch.from_numpy(np.asarray(packed, np.uint8)), "weight_scale": factor}

    quantisation: Config = {
        "quant_method": "bitnet", "linear_class": linear_class, "quantization_mode": "offline", "use_rms_norm": False,
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    return replace_weights("small", quantisation, pack, "bfloat16")


def gpt_oss() -> Folder:
    """Write a gpt-oss with two experts in MXFP4, [experts, outputs, blocks, 16 bytes], and one exponent per block."""
    hidden, width, draw = 64, 32, np.random.default_rng(42)
    settings = config("small") | {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "num_local_experts": 2,
        "num_experts_per_tok": 1, "intermediate_size": width, "sliding_window": 128, "swiglu_limit": 7.0,
        "layer_types": ["sliding_attention"],
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                       "lm_head"],
        },
    }  # fmt: skip
    tensors = {name: tensor for name, tensor in float_tensors("small").items() if ".mlp." not in name}
    attention, experts = f"{LAYER}.self_attn", f"{LAYER}.mlp.experts"
    sizes = {f"{name}.bias": shape[:1] for name, shape in shapes("small").items() if "self_attn" in name}
    sizes |= {f"{attention}.sinks": (4,), f"{LAYER}.mlp.router.weight": (2, hidden), f"{LAYER}.mlp.router.bias": (2,)}
    sizes |= {f"{experts}.gate_up_proj_bias": (2, 2 * width), f"{experts}.down_proj_bias": (2, hidden)}
    tensors |= {name: torch.from_numpy(draw.normal(0, 0.1, size)).to(torch.bfloat16) for name, size in sizes.items()}
    for name, shape in {"gate_up_proj": (2, 2 * width, hidden), "down_proj": (2, hidden, width)}.items():
        blocks = draw.normal(0, 0.03, (*shape[:2], shape[2] // 32, 32))
        exponent = np.floor(np.log2(abs(blocks).max(-1))) - 2
        codes = to_e2m1(blocks / 2 ** exponent[..., None]).reshape(-1, 32)
        tensors[f"{experts}.{name}_blocks"] = nibbles(codes).reshape(*blocks.shape[:3], 16)
        tensors[f"{experts}.{name}_scales"] = torch.from_numpy((exponent + 127).astype(np.uint8))
    return settings, tensors


def compressed(bits: int, group: int, *, act_order=False, words="stream") -> Folder:
    """Write older `pack-quantized` files: `weight_g_idx`, or 10 codes of 3 bits per word."""
    draw = np.random.default_rng(40)

    def pack(name: str, weight: Array) -> Tensors:
        group_of = np.arange(weight.shape[1]) // group
        group_of = group_of[draw.permutation(len(group_of))] if act_order else group_of
        codes, scales, _ = grouped(weight, group_of, bits, symmetric=True, scale_dtype=torch.bfloat16)
        if words == "stream":
            packed = stream(codes, bits)
        else:
            n_words = -(-codes.shape[1] * 1 // (32 // bits))
            padded = np.pad(codes, ((0, 0), (0, n_words * (32 // bits) - codes.shape[1]))).astype(np.int64)
            shifts = np.arange(32 // bits) * bits
            words_of = (padded.reshape(len(codes), n_words, -1) << shifts).sum(-1)
            packed = torch.from_numpy(words_of.astype(np.uint32).view(np.int32))
        index = {"weight_g_idx": torch.from_numpy(group_of.astype(np.int32))} if act_order else {}
        shape = torch.tensor(weight.shape, dtype=torch.int64)
        return {"weight_packed": packed, "weight_scale": scales, "weight_shape": shape} | index

    weights: Config = {
        "num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": group, "dynamic": False,
        "block_structure": None, "actorder": "group" if act_order else None, "observer": "minmax",
    }  # fmt: skip
    quantisation: Config = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None,
                                      "output_activations": None}},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "global_compression_ratio": None, "version": "0.9.1",
    }  # fmt: skip
    return replace_weights("small", quantisation, pack, "bfloat16")


def write(folder: Path, settings: Config, tensors: Tensors) -> None:
    """Write a folder, with the second configuration file that ModelOpt writes."""
    write_folder(folder, settings, tensors)
    quantisation = settings["quantization_config"]
    assert isinstance(quantisation, dict)
    if algorithm := quantisation.get("quant_algo"):
        second = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
        second |= {"group_size": 16} if algorithm == "NVFP4" else {}
        text = json.dumps({"producer": quantisation["producer"], "quantization": second}, indent=1) + "\n"
        (folder / "hf_quant_config.json").write_text(text, encoding="utf-8", newline="\n")


FOLDERS: dict[str, Callable[[], Folder]] = {
    "gptq-3bit": lambda: gptq(3, 32, size="tiny"),
    "gptq-4bit": lambda: gptq(4, 32),
    "gptq-4bit-g128": lambda: gptq(4, 128, size="wide"),
    "gptq-4bit-partial-group": lambda: gptq(4, 64, g_idx=False),
    "gptq-8bit": lambda: gptq(8, 32),
    "gptq-4bit-channel": lambda: gptq(4, -1, size="tiny"),
    "gptq-4bit-act-order": lambda: gptq(4, 32, act_order=True),
    "gptq-2bit-asym": lambda: gptq(2, 32, symmetric=False, size="tiny"),
    "gptq-3bit-asym": lambda: gptq(3, 32, symmetric=False, size="tiny"),
    "gptq-4bit-asym": lambda: gptq(4, 32, symmetric=False),
    "gptq-v2-4bit": lambda: gptq(4, 32, version=2),
    "gptq-v2-4bit-asym-act-order": lambda: gptq(4, 32, symmetric=False, act_order=True, version=2),
    "gptq-4bit-qwen2": gptq_with_biases,
    "awq-gemm": lambda: awq(32),
    "auto-round-gptq": lambda: gptq(4, 32, size="tiny", auto=True),
    "auto-round-awq": lambda: awq(32, size="tiny", auto=True),
    "fp8-block-partial": lambda: fp8(128),
    "fp8-block-bf16-scale": lambda: fp8(128, scale_dtype=torch.bfloat16),
    "fp8-tensor-static": lambda: fp8(None, static=True, size="tiny"),
    "mxfp8": mxfp8,
    "fbgemm-fp8": fbgemm,
    "modelopt-nvfp4": lambda: modelopt("NVFP4"),
    "modelopt-fp8": lambda: modelopt("FP8"),
    "gpt-oss-mxfp4": gpt_oss,
    "bitnet-autobitlinear": lambda: bitnet("autobitlinear"),
    "bitnet-bitlinear": lambda: bitnet("bitlinear"),
    "ct-w4a16-weight-g-idx": lambda: compressed(4, 32, act_order=True),
    "ct-w3a16-ten-per-word": lambda: compressed(3, 32, words="ten"),
}
