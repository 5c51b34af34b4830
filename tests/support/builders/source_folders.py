"""Random Hugging Face folders in the form of published models, as the source of a conversion.

Every row length is a multiple of 256, so that K- and I-quants apply. transformers is not needed: its names, shapes and
keys of config.json are typed out here.

Source: transformers 5 `save_pretrained` of each family (names, shapes, keys); config.json of Llama 3.2, Qwen2.5, Qwen3,
Qwen3-30B-A3B and Qwen3.5 (which values differ from the defaults).
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors

from builders.chat_models import CHATML, LLAMA_3
from builders.quantised_folders import written
from llorch.files.convert import convert
from llorch.files.tokenizer.pipeline import WORDS
from llorch.runtime.builtin import builtin_path

Dtype = Literal["BF16", "F32"]
HEAD_DIM, N_EXPERTS, TAPS = 64, 4, 4
_ALWAYS_F32 = (".A_log", ".linear_attn.norm.weight")  # published folders keep these in float32
_LLAMA_3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip
_PARTIAL_ROPE = {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
}  # fmt: skip
_QWEN_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_NO_WINDOW = {"sliding_window": None, "use_sliding_window": False}
_TEXT_END = {"micro-llama3": "<|end_of_text|>", "micro-qwen2": "<|endoftext|>"}
_DIGIT_MERGES = [["1", "2"], ["12", "3"], ["2", "0"], ["20", "2"]]
_HEAD = {"head_dim": HEAD_DIM, "attention_bias": False}


@dataclass(frozen=True, kw_only=True)
class SourceFamily:
    """Facts of a family's published folders.

    Attributes:
        config: Keys of config.json that other families lack, or have with another value.
        vocabulary: Built-in model that lends its tokens.
        words: llama.cpp's name of the pre-tokenizer.
        end: Text of the end token.
        template: Chat template.
        has_biases: q, k and v have biases.
        has_head_norms: q and k have norms of a head.
        has_norm_offset: Norms multiply by 1 + w; only the gated norm multiplies by w.
    """

    config: Mapping[str, Any]
    vocabulary: str = "micro-qwen2"
    words: str = "qwen2"
    end: str = "<|im_end|>"
    template: str = CHATML
    has_biases: bool = False
    has_head_norms: bool = False
    has_norm_offset: bool = False


FAMILIES: dict[str, SourceFamily] = {
    "llama": SourceFamily(
        config=_HEAD | {
            "architectures": ["LlamaForCausalLM"], "mlp_bias": False, "rms_norm_eps": 1e-5,
            "rope_parameters": _LLAMA_3_ROPE,
        },
        vocabulary="micro-llama3", words="llama-bpe", end="<|eot_id|>", template=LLAMA_3,
    ),
    "qwen2": SourceFamily(
        config=_NO_WINDOW | {"architectures": ["Qwen2ForCausalLM"], "rope_parameters": _QWEN_ROPE},
        has_biases=True,
    ),
    "qwen3": SourceFamily(
        config=_HEAD | _NO_WINDOW | {
            "architectures": ["Qwen3ForCausalLM"], "rope_parameters": _QWEN_ROPE, "tie_word_embeddings": True,
        },
        has_head_norms=True,
    ),
    "qwen3_moe": SourceFamily(
        config=_HEAD | _NO_WINDOW | {
            "architectures": ["Qwen3MoeForCausalLM"], "rope_parameters": _QWEN_ROPE, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "norm_topk_prob": True, "num_local_experts": N_EXPERTS, "num_experts_per_tok": 2,
        },
        has_head_norms=True,
    ),
    "qwen3_5": SourceFamily(
        config=_HEAD | {
            "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "rope_parameters": _PARTIAL_ROPE, "linear_conv_kernel_dim": TAPS, "linear_key_head_dim": HEAD_DIM,
            "linear_value_head_dim": HEAD_DIM, "attn_output_gate": True,
        },
        words="qwen35", has_head_norms=True, has_norm_offset=True,
    ),
}  # fmt: skip


def write_source(
    folder: Path, family: str, *, vocabulary: bool = True, width: int = 256, dtype: Dtype = "BF16", seed: int = 0
) -> Path:
    """Write a random model of a row of `FAMILIES`, with a tokenizer and a chat template if `vocabulary` is true.

    Args:
        folder: Folder to write; it must not exist.
        family: Key of `FAMILIES`.
        vocabulary: Write the tokenizer files.
        width: Hidden size, a multiple of 256.
        dtype: Number type of the tensors; `A_log` and the gated norm are always F32.
        seed: Seed of the random numbers.

    Raises:
        ValueError: The width is no multiple of 256.
    """
    if width % 256:
        raise ValueError(f"width: expected a multiple of 256, got {width}")
    folder.mkdir(parents=True)
    row = FAMILIES[family]
    config = _config(family, width, dtype) | (_write_tokenizer(folder, row) if vocabulary else {})
    rng = np.random.default_rng(seed)
    tensors = {
        name: _random_values(rng, name, shape, has_norm_offset=row.has_norm_offset)
        for name, shape in _shapes(config, row).items()
    }
    return write_model(folder, config, tensors, {name: dtype for name in tensors if not name.endswith(_ALWAYS_F32)})


def write_model(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], dtypes: Mapping[str, Dtype]
) -> Path:
    """Write config.json and float32 arrays, each in its type of `dtypes`, else F32; BF16 rounds to nearest even."""
    bodies = {
        name: to_bfloat16(array) if dtypes.get(name) == "BF16" else array.astype("<f4")
        for name, array in tensors.items()
    }
    return written(
        folder,
        config,
        {name: (dtypes.get(name, "F32"), [*body.shape], body.tobytes()) for name, body in bodies.items()},
    )


def read_tensors(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Dtype]]:
    """Read `model.safetensors` with the safetensors package: float32 arrays and the stored types by name."""
    arrays: dict[str, np.ndarray] = {}
    dtypes: dict[str, Dtype] = {}
    entries = dict(safetensors.deserialize((folder / "model.safetensors").read_bytes()))
    for name, entry in sorted(entries.items()):  # the package's order changes from run to run
        dtypes[name] = entry["dtype"]
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(entry["data"], "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(entry["data"], "<f4")
        arrays[name] = values.reshape(entry["shape"])
    return arrays, dtypes


def to_bfloat16(array: np.ndarray) -> np.ndarray:
    """Round finite float32 numbers to the nearest bfloat16, ties to even; return the upper 16 bits of each."""
    bits = np.ascontiguousarray(array, "<f4").view("<u4")
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")


def _config(family: str, width: int, dtype: Dtype) -> dict[str, Any]:
    n_heads = width // HEAD_DIM
    config: dict[str, Any] = {
        "attention_dropout": 0.0, "bos_token_id": None, "dtype": "bfloat16" if dtype == "BF16" else "float32",
        "eos_token_id": None, "hidden_act": "silu", "hidden_size": width, "initializer_range": 0.02,
        "intermediate_size": 2 * width, "max_position_embeddings": 4096, "model_type": family,
        "num_attention_heads": n_heads, "num_hidden_layers": 2, "num_key_value_heads": n_heads // 2,
        "pad_token_id": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "transformers_version": "5.0.0",
        "use_cache": True, "vocab_size": 384,
    }  # fmt: skip
    config |= FAMILIES[family].config
    if "num_local_experts" in config:
        config["moe_intermediate_size"] = width
    if "linear_conv_kernel_dim" in config:
        config |= {"linear_num_key_heads": n_heads // 2, "linear_num_value_heads": n_heads}
    return config


def _write_tokenizer(folder: Path, row: SourceFamily) -> dict[str, Any]:
    """Write the tokenizer files; return the keys of config.json that follow from them."""
    tokenizer, tokenizer_config = (json.loads(text) for text in _tokenizer_texts(row.vocabulary))
    tokenizer["pre_tokenizer"] = WORDS[row.words]
    _add_digit_merges(tokenizer)
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    begin = tokenizer_config["bos_token"]
    adds_begin = begin in json.dumps(tokenizer["post_processor"])
    tokenizer_config |= {"bos_token": begin if adds_begin else None, "eos_token": row.end, "pad_token": begin}
    template = row.template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    model_ids = {"bos_token_id": ids[begin], "eos_token_id": ids[row.end]}
    generation = model_ids | {"eos_token_id": [ids[row.end], ids[_TEXT_END[row.vocabulary]]]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    n_tokens = 1 + max(ids.values())
    rows = n_tokens if adds_begin else -(-n_tokens // 64) * 64  # Qwen pads the embedding, Llama does not
    return model_ids | {"vocab_size": rows}


def _add_digit_merges(tokenizer: dict[str, Any]) -> None:
    """Add merges of digits: pre-tokenizers that differ in groups of digits then give other ids.

    The ids of the added tokens move up, because they must follow those of the model.
    """
    vocabulary, n_tokens = tokenizer["model"]["vocab"], len(tokenizer["model"]["vocab"])
    vocabulary |= {left + right: n_tokens + index for index, (left, right) in enumerate(_DIGIT_MERGES)}
    tokenizer["model"]["merges"] += _DIGIT_MERGES
    for token in tokenizer["added_tokens"]:
        token["id"] += len(_DIGIT_MERGES)
    special_tokens = tokenizer["post_processor"]["processors"][-1]["special_tokens"]
    for special in special_tokens.values():
        special["ids"] = [token_id + len(_DIGIT_MERGES) for token_id in special["ids"]]


@cache
def _tokenizer_texts(model: str) -> tuple[str, str]:
    """Return tokenizer.json and tokenizer_config.json of a built-in model."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / model
        convert(builtin_path(model), folder)
        return (folder / "tokenizer.json").read_text("utf-8"), (folder / "tokenizer_config.json").read_text("utf-8")


def _shapes(config: Mapping[str, Any], row: SourceFamily) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors by their names in the folder."""
    hidden, rows = config["hidden_size"], config["vocab_size"]
    shapes = {"model.embed_tokens.weight": (rows, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (rows, hidden)
    for layer, layer_type in enumerate(config.get("layer_types", ["full_attention"] * config["num_hidden_layers"])):
        block = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        block |= _attention(config, row) if layer_type == "full_attention" else _delta_net(config)
        block |= _feed_forward(config)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def _attention(config: Mapping[str, Any], row: SourceFamily) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    n_q, n_kv = (config[f"num_{name}_heads"] * HEAD_DIM for name in ("attention", "key_value"))
    rows = {"q": n_q * (2 if config.get("attn_output_gate") else 1), "k": n_kv, "v": n_kv}
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{part}_proj.weight": (n, hidden) for part, n in rows.items()}
    if row.has_biases:
        shapes |= {f"self_attn.{part}_proj.bias": (n,) for part, n in rows.items()}
    if row.has_head_norms:
        shapes |= {f"self_attn.{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
    return shapes | {"self_attn.o_proj.weight": (hidden, n_q)}


def _delta_net(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, n_heads = config["hidden_size"], config["linear_num_value_heads"]
    n_keys, n_values = config["linear_num_key_heads"] * HEAD_DIM, n_heads * HEAD_DIM
    shapes = {
        "in_proj_qkv.weight": (2 * n_keys + n_values, hidden), "in_proj_z.weight": (n_values, hidden),
        "in_proj_b.weight": (n_heads, hidden), "in_proj_a.weight": (n_heads, hidden), "A_log": (n_heads,),
        "dt_bias": (n_heads,), "conv1d.weight": (2 * n_keys + n_values, 1, TAPS), "norm.weight": (HEAD_DIM,),
        "out_proj.weight": (hidden, n_values),
    }  # fmt: skip
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def _feed_forward(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config.get("moe_intermediate_size", config["intermediate_size"])
    n_experts = config.get("num_local_experts")
    prefixes = ["mlp."] if n_experts is None else [f"mlp.experts.{expert}." for expert in range(n_experts)]
    shapes = {} if n_experts is None else {"mlp.gate.weight": (n_experts, hidden)}
    for prefix in prefixes:
        shapes |= {f"{prefix}{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        shapes[f"{prefix}down_proj.weight"] = (hidden, inner)
    return shapes


def _random_values(rng: np.random.Generator, name: str, shape: tuple[int, ...], *, has_norm_offset: bool) -> np.ndarray:
    """Draw numbers as a trained model has them: no gain is one, no bias zero, matrices of 0.02 to 0.1 with outliers."""
    draw = rng.standard_normal(shape).astype(np.float32)
    if name.endswith("A_log"):
        return np.log(rng.uniform(0.1, 16, shape)).astype(np.float32)
    if name.endswith("dt_bias"):
        steps = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), shape))
        return (steps + np.log(-np.expm1(-steps))).astype(np.float32)  # the inverse of softplus
    if len(shape) == 1:
        is_gain = name.endswith("norm.weight") and (name.endswith(_ALWAYS_F32) or not has_norm_offset)
        return np.float32(0.1) * draw + np.float32(is_gain)
    if name.endswith(("conv1d.weight", "mlp.gate.weight")):
        return np.float32(0.3) * draw
    draw[..., rng.permutation(shape[-1])[: shape[-1] // 64]] *= 4
    return np.float32(rng.uniform(0.02, 0.1)) * draw
