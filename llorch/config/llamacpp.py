"""What llama.cpp computes otherwise than a configuration says, so that no GGUF file can express it.

It has constants, or nothing at all, where some families have hyperparameters, and says nothing of that: its numbers
are those of another model. We compute what the configuration says; such a model is not written as a GGUF file, and
llama.cpp is no witness of it.

Source: llama.cpp `src/models/{llama,llama4,mistral3,qwen2,qwen2moe,qwen3moe,qwen3next,smollm3}.cpp`,
`src/models/delta-net-base.cpp`, each tried.
"""

import math
from collections.abc import Iterator

from llorch.config import FAMILIES, ModelConfig
from llorch.config.gguf import CHUNK_OF_LLAMA4, NO_HEAD_NORM, ROPE_INTERVAL, TEMPERATURE_OF_LLAMA4

_O_BIAS = ("llama",)  # of these families llama.cpp reads attn_output.bias
_AS_WIDE = ("qwen2", "qwen2_moe", "qwen2_5_vl")  # as the model all heads together have to be
_UNTIED = ("qwen2_moe",)


def cannot_express(config: ModelConfig, n_tokens: int | None = None) -> str:
    """Why llama.cpp computes something else in runs of up to so many tokens, or of the whole context; empty if not."""
    return next(_reasons(config, config.max_position_embeddings if n_tokens is None else n_tokens), "")


def _reasons(config: ModelConfig, n_tokens: int) -> Iterator[str]:
    layers, experts = [config.layer(i) for i in range(config.n_layers)], config.experts
    window = min((layer.window for layer in layers if layer.window is not None), default=n_tokens)
    if window < n_tokens:
        yield f"llama.cpp reads no sliding_window for {config.family}, this configuration has {window}"
    if config.family in ("smollm3", "llama4") and [layer.rope for layer in layers] != _every_fourth(len(layers)):
        yield f"llama.cpp skips RoPE in every fourth layer of {config.family}, no_rope_layers has other layers"
    normalises = FAMILIES[config.family].norm_topk_prob
    if experts is not None and normalises is not None and experts.norm_topk_prob != normalises:
        said = str(experts.norm_topk_prob).lower()
        yield f"llama.cpp hard-codes norm_topk_prob for {config.family}, this configuration has {said}"
    if normalises is not None and not all(layer.experts for layer in layers):
        yield f"llama.cpp has experts in all layers of {config.family}, mlp_only_layers or decoder_sparse_step differ"
    if config.family == "llama4":
        yield from _reasons_of_llama4(config, n_tokens)
    yield from _reasons_of_shapes(config)


def _reasons_of_shapes(config: ModelConfig) -> Iterator[str]:
    family, net = config.family, config.delta_net
    if net is not None and net.key_head_dim != net.value_head_dim:
        yield (
            f"llama.cpp expects delta nets with keys as wide as values, linear_key_head_dim is {net.key_head_dim}, "
            f"linear_value_head_dim {net.value_head_dim}"
        )
    if config.o_bias and family not in _O_BIAS:
        yield f"llama.cpp reads a bias of attn_output only for the llama family, got {family}"
    if config.q_width != config.hidden_size and family in _AS_WIDE:
        yield f"llama.cpp expects {family} heads with a total width of {config.hidden_size}, got {config.q_width}"
    if config.tie_word_embeddings and family in _UNTIED:
        yield f"llama.cpp expects an output matrix for {family}, this configuration has tie_word_embeddings"


def _every_fourth(n_layers: int) -> list[bool]:
    return [(i + 1) % ROPE_INTERVAL != 0 for i in range(n_layers)]


def _reasons_of_llama4(config: ModelConfig, n_tokens: int) -> Iterator[str]:
    layers = [config.layer(i) for i in range(config.n_layers)]
    for chunk in (layer.chunk or math.inf for layer in layers if layer.rope):
        if chunk != CHUNK_OF_LLAMA4 and min(chunk, CHUNK_OF_LLAMA4) < n_tokens:
            said = "none" if chunk == math.inf else chunk
            yield f"llama.cpp hard-codes attention_chunk_size {CHUNK_OF_LLAMA4}, this configuration has {said}"
    ours, theirs = config.temperature, TEMPERATURE_OF_LLAMA4
    same = ours == theirs and all(layer.tempered != layer.rope for layer in layers)
    if not same and n_tokens >= min(theirs.floor, theirs.floor if ours is None else ours.floor):
        yield "llama.cpp hard-codes floor_scale 8192 and attn_scale 0.1, this configuration has other values"
    if config.experts is None:
        yield "llama.cpp cannot run Llama 4 without experts"
        return
    norms = config.experts.n_experts != NO_HEAD_NORM
    if any(layer.rope and layer.head_norm != norms for layer in layers):
        yield (
            f"llama.cpp normalises heads unless there are {NO_HEAD_NORM} experts, use_qk_norm differs for "
            f"{config.experts.n_experts} experts"
        )
    step = next((i + 1 for i, layer in enumerate(layers) if layer.experts), 0)
    if [layer.experts for layer in layers] != [step > 0 and (i + 1) % step == 0 for i in range(len(layers))]:
        yield "llama.cpp expects experts in every n-th layer, moe_layers has other layers"
