"""Random sizes and settings of every family, as keys of its configuration; includes keys that engines hard-code."""

from typing import Any

import numpy as np

Sizes = dict[str, Any]
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SCALINGS: tuple[Sizes | None, ...] = (
    None,
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 512},
)  # fmt: skip


class Draw:
    """Random draws of one model."""

    def __init__(self, seed: int) -> None:
        """Start the draws from a seed; an equal seed gives an equal model."""
        self.seed, self.rng = seed, np.random.default_rng(seed)

    def between(self, low: int, high: int) -> int:
        """Draw an integer, both ends included."""
        return int(self.rng.integers(low, high + 1))

    def rarely(self) -> bool:
        """Return True once in four draws."""
        return self.rng.random() < 0.25

    def one_of(self, *choices: Any) -> Any:
        """Draw one of these choices."""
        return choices[self.rng.integers(len(choices))]

    def dense(self, *, own_head_dim: bool = True) -> Sizes:
        """Draw the keys that all families have; without a `head_dim`, n_heads * head_dim is the hidden size."""
        n_kv_heads, head_dim = self.between(1, 3), 8 * self.between(1, 3)
        n_heads = n_kv_heads * self.between(1, 3)
        sizes: Sizes = {
            "num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads, "num_hidden_layers": self.between(2, 5),
            "hidden_size": 2 * self.between(10, 45) if own_head_dim else n_heads * head_dim,
            "intermediate_size": self.between(10, 120), "vocab_size": self.between(104, 300),
            "rms_norm_eps": self.one_of(1e-5, 1e-6), "tie_word_embeddings": self.rarely(),
        }  # fmt: skip
        return sizes | ({"head_dim": head_dim} if own_head_dim else {})

    def experts(self, *, shared: bool) -> Sizes:
        """Draw experts in every layer, or seldom in some."""
        n_experts = self.between(2, 13)
        sizes = {"num_experts": n_experts, "num_experts_per_tok": self.between(1, n_experts)}
        sizes |= {"moe_intermediate_size": self.between(6, 60)}
        return sizes | ({"shared_expert_intermediate_size": self.between(6, 60)} if shared else {})

    def some_dense(self, n_layers: int) -> Sizes:
        """Draw layers without experts, which llama.cpp does not read."""
        if not self.rarely():
            return {}
        return self.one_of({"decoder_sparse_step": 2}, {"mlp_only_layers": [self.between(0, n_layers - 1)]})

    def hybrid(self) -> Sizes:
        """Draw delta nets between layers of attention; keys and values seldom have different widths."""
        n_keys, width, interval = self.between(1, 3), 2 * self.between(2, 12), 2 if self.rarely() else 4
        n_layers = self.between(interval, 6)
        kinds = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(n_layers)]
        return {
            "linear_num_key_heads": n_keys, "linear_num_value_heads": n_keys * self.between(1, 3),
            "linear_key_head_dim": width, "linear_value_head_dim": width + 2 if self.rarely() else width,
            "linear_conv_kernel_dim": self.between(2, 5), "num_hidden_layers": n_layers, "layer_types": kinds,
            "full_attention_interval": interval, "rms_norm_eps": 1e-5 if self.rarely() else 1e-6,
        }  # fmt: skip

    def window(self, switch: str | None = None) -> Sizes:
        """Draw a window that a text may exceed and that is seldom turned on; `switch` is the key that turns it on."""
        is_enabled = self.rarely()
        switches = {switch: is_enabled} if switch else {}
        return switches | {"sliding_window": self.between(3, 40) if is_enabled or switch else None}


def sections(draw: Draw, head_dim: int, share: float) -> Sizes:
    """Draw RoPE of three axes over a share of the head; rarely with axes whose order llama.cpp does not follow."""
    half = int(head_dim * share) // 2
    axes = [half - 2 * (half // 3), half // 3, half // 3] if draw.rarely() else [(half + i) // 3 for i in (2, 1, 0)]
    return {"rope_parameters": {
        "rope_theta": 1e5, "rope_type": "default", "partial_rotary_factor": share,
        "mrope_section": axes,
    }}  # fmt: skip


def dense(draw: Draw) -> Sizes:
    """Draw all keys of a Llama, Qwen2 or Qwen3 model that both engines load."""
    family = draw.one_of(*CLASSES)
    n_kv_heads, group, head_dim = draw.between(1, 3), draw.between(1, 3), 8 * draw.between(1, 8)
    n_heads = n_kv_heads * group
    sizes: Sizes = {
        "model_type": family, "architectures": [CLASSES[family]], "hidden_act": "silu",
        "num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads,
        "hidden_size": n_heads * (8 * draw.between(1, 6) if family == "qwen3" else head_dim),
        "intermediate_size": 8 * draw.between(2, 59), "num_hidden_layers": draw.between(1, 3),
        "vocab_size": draw.between(40, 2999), "rms_norm_eps": draw.one_of(1e-5, 1e-6),
        "rope_theta": draw.one_of(1e4, 5e5, 1e6), "max_position_embeddings": draw.one_of(64, 2048, 8192),
        "tie_word_embeddings": draw.rng.random() < 0.5,
    }  # fmt: skip
    if family != "qwen2":
        has_bias = family == "llama" and draw.rng.random() < 0.3  # llama.cpp has a bias of attn_output in llama only
        sizes |= {"head_dim": head_dim, "attention_bias": has_bias}
    scaling = draw.one_of(*SCALINGS[: None if family == "llama" else -1])  # llama.cpp has llama3's for llama only
    return sizes | ({"rope_scaling": scaling} if scaling and draw.rng.random() < 0.6 else {})


def quantised(draw: Draw) -> Sizes:
    """Draw a dense model; if its seed is even, with rows of whole super-blocks."""
    sizes = dense(draw)
    if draw.seed % 2:
        return sizes
    n_heads = 4 * sizes["num_key_value_heads"]
    sizes |= {
        "num_attention_heads": n_heads,
        "hidden_size": 64 * n_heads,
        "intermediate_size": 256 * draw.between(1, 4),
    }
    return sizes | ({"head_dim": 64} if "head_dim" in sizes else {})


def qwen2_moe(draw: Draw) -> Sizes:
    """Draw experts with a shared one, without a head_dim."""
    sizes = draw.dense(own_head_dim=False) | draw.experts(shared=True)
    sizes |= {"norm_topk_prob": draw.rarely(), "tie_word_embeddings": False, **draw.window("use_sliding_window")}
    return sizes | draw.some_dense(sizes["num_hidden_layers"])


def qwen3_moe(draw: Draw) -> Sizes:
    """Draw experts whose weights are normalised, seldom not."""
    sizes = draw.dense() | draw.experts(shared=False) | {"norm_topk_prob": not draw.rarely()}
    return sizes | draw.window("use_sliding_window") | draw.some_dense(sizes["num_hidden_layers"])


def qwen3_next(draw: Draw) -> Sizes:
    """Draw delta nets with experts."""
    sizes = draw.dense() | draw.experts(shared=True) | {"norm_topk_prob": not draw.rarely()} | draw.hybrid()
    return sizes | {"partial_rotary_factor": draw.one_of(0.25, 0.5, 1.0)} | draw.some_dense(sizes["num_hidden_layers"])


def qwen3_5(draw: Draw) -> Sizes:
    """Draw delta nets with dense layers."""
    sizes = draw.dense() | draw.hybrid()
    return sizes | sections(draw, sizes["head_dim"], draw.one_of(0.25, 0.5, 1.0))


def qwen3_5_moe(draw: Draw) -> Sizes:
    """Draw delta nets with experts in every layer."""
    sizes = draw.dense() | draw.experts(shared=True) | draw.hybrid()
    return sizes | sections(draw, sizes["head_dim"], draw.one_of(0.25, 0.5, 1.0))


def qwen2(draw: Draw) -> Sizes:
    """Draw a window from some layer on."""
    return (
        draw.dense(own_head_dim=False) | draw.window("use_sliding_window") | {"max_window_layers": draw.between(0, 2)}
    )


def mistral(draw: Draw) -> Sizes:
    """Draw a Llama with a window; its file is that of a Llama, and transformers needs heads that divide the width."""
    sizes = draw.dense()
    return sizes | {"hidden_size": sizes["num_attention_heads"] * draw.between(3, 20)} | draw.window()


def smollm3(draw: Draw) -> Sizes:
    """Draw layers without RoPE: every fourth, seldom others."""
    sizes = draw.dense(own_head_dim=False) | {"num_hidden_layers": draw.between(4, 6)}
    interval = {"no_rope_layer_interval": 3} if draw.rarely() else {}
    return sizes | interval | draw.window("use_sliding_window")


def ministral3(draw: Draw) -> Sizes:
    """Draw YaRN and a temperature by position."""
    rope = {
        "rope_type": "yarn", "rope_theta": 1e5, "factor": float(draw.between(2, 16)),
        "original_max_position_embeddings": draw.one_of(16, 32, 64), "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": draw.one_of(1.0, 0.8), "mscale_all_dim": 1.0, "llama_4_scaling_beta": draw.one_of(0.1, 0.2),
    }  # fmt: skip
    return draw.dense() | {"rope_parameters": rope} | draw.window()


def llama4(draw: Draw) -> Sizes:
    """Draw chunks, temperature, weightless norms of heads, and experts in some layers."""
    n_experts = draw.between(2, 9)
    sizes = draw.dense() | {"num_local_experts": n_experts, "intermediate_size_mlp": draw.between(10, 120)}
    sizes |= {"num_experts_per_tok": draw.between(1, n_experts), "interleave_moe_layer_step": draw.between(1, 2)}
    sizes |= {"num_hidden_layers": draw.between(4, 6), "use_qk_norm": not draw.rarely()}
    if draw.rarely():
        sizes |= {"attention_chunk_size": draw.between(5, 30), "floor_scale": draw.between(4, 20), "attn_scale": 0.2}
    return sizes


def qwen2_5_vl(draw: Draw) -> Sizes:
    """Draw the text part; the sections of its RoPE follow from its heads."""
    return draw.dense(own_head_dim=False)


def qwen3_vl(draw: Draw) -> Sizes:
    """Draw the text part, with sections of RoPE."""
    sizes = draw.dense()
    return sizes | sections(draw, sizes["head_dim"], 1.0)


FAMILIES = {
    make.__name__: make
    for make in (
        qwen2_moe, qwen3_moe, qwen3_next, qwen3_5, qwen3_5_moe, qwen2, mistral, smollm3, ministral3, llama4,
        qwen2_5_vl, qwen3_vl, dense, quantised,
    )
}  # fmt: skip
