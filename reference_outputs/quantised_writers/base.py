"""Make the float model that every folder quantises, and write folders."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
Config = dict[str, object]

SIZES = {  # hidden, feed-forward: no multiples of 128; both multiples; a weight of more than 256 blocks of 64; 9 groups
    "tiny": (32, 64),
    "small": (64, 160),
    "wide": (128, 128),
    "nested": (128, 192),
    "experts": (64, 64),
    "even": (64, 128),
    "long": (32, 288),
}
N_EXPERTS, N_CHOSEN = 4, 2
N_HEADS, N_KV_HEADS, VOCAB = 4, 2, 24
LAYER = "model.layers.0"


def head_dim(size: str) -> int:
    """Return the width of a head."""
    return 32 if size == "wide" else 16


def config(size: str) -> Config:
    """Return config.json of a Llama with one layer, or of a Qwen3-MoE."""
    hidden, intermediate = SIZES[size]
    values: Config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": N_HEADS,
        "num_key_value_heads": N_KV_HEADS,
        "head_dim": head_dim(size),
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if size != "experts":
        return values
    return values | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": N_EXPERTS,
        "num_experts_per_tok": N_CHOSEN,
        "moe_intermediate_size": intermediate,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def shapes(size: str) -> dict[str, tuple[int, int]]:
    """Return the name and shape of each Linear module of the layer."""
    hidden, intermediate = SIZES[size]
    queries, kv = N_HEADS * head_dim(size), N_KV_HEADS * head_dim(size)
    feed_forward = [f"{LAYER}.mlp"]
    if size == "experts":
        feed_forward = [f"{LAYER}.mlp.experts.{e}" for e in range(N_EXPERTS)]
    router = {f"{LAYER}.mlp.gate": (N_EXPERTS, hidden)} if size == "experts" else {}
    return router | {
        f"{LAYER}.self_attn.q_proj": (queries, hidden),
        f"{LAYER}.self_attn.k_proj": (kv, hidden),
        f"{LAYER}.self_attn.v_proj": (kv, hidden),
        f"{LAYER}.self_attn.o_proj": (hidden, queries),
        **{
            f"{mlp}.{name}_proj": (hidden, intermediate) if name == "down" else (intermediate, hidden)
            for mlp in feed_forward
            for name in ("gate", "up", "down")
        },
    }


def float_tensors(size: str) -> Tensors:
    """Draw BF16 weights: sigma 0.02 to 0.05, a few outliers, and one row each without negative and positive values."""
    draw = np.random.default_rng(38)
    hidden = SIZES[size][0]
    tensors = {"model.embed_tokens.weight": draw.normal(0, 0.5, (VOCAB, hidden))}
    for name, shape in shapes(size).items():
        weight = draw.normal(0, draw.uniform(0.02, 0.05), shape)
        weight.flat[draw.choice(weight.size, weight.size // 200, replace=False)] *= 8
        if len(weight) > N_EXPERTS:
            weight[3], weight[5] = abs(weight[3]), -abs(weight[5])  # zero points 0 and 2^b - 1 of asymmetric formats
        tensors[f"{name}.weight"] = weight
    for name in ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm"):
        tensors[f"{name}.weight"] = draw.normal(1, 0.1, hidden)
    if size == "experts":
        for name in ("q_norm", "k_norm"):
            tensors[f"{LAYER}.self_attn.{name}.weight"] = draw.normal(1, 0.1, head_dim(size))
    tensors["lm_head.weight"] = draw.normal(0, 0.05, (VOCAB, hidden))
    return {name: torch.from_numpy(value).to(torch.bfloat16) for name, value in tensors.items()}


def write(folder: Path, settings: Config, tensors: Tensors, metadata: dict[str, str] | None = None) -> None:
    """Write config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8", newline="\n")
    contiguous = {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}
    save_file(contiguous, folder / "model.safetensors", metadata or {"format": "pt"})
