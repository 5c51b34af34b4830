"""What llama.cpp computes otherwise than a configuration says, so that no GGUF file can express it.

It has constants, or nothing at all, where some families have hyperparameters, and says nothing of that: its numbers
are those of another model. We compute what the configuration says; such a model is not written as a GGUF file, and
llama.cpp does not check it.

Source: llama.cpp `src/models/{llama,llama4,mistral3,qwen2,qwen2moe,qwen3moe,qwen3next,smollm3}.cpp`,
`src/models/delta-net-base.cpp`, each tried.
"""

import math
from collections.abc import Iterator

from llorch.families.config import FAMILIES, ModelConfig
from llorch.families.family import Family
from llorch.families.layers import Temperature


def cannot_express(config: ModelConfig, n_tokens: int | None = None) -> str:
    """Explain why llama.cpp differs in runs of up to `n_tokens` (None: the context length); empty if it does not."""
    return next(_reasons_of_layers(config, config.max_position_embeddings if n_tokens is None else n_tokens), "")


def _reasons_of_layers(config: ModelConfig, n_tokens: int) -> Iterator[str]:
    """Yield the reasons why llama.cpp computes layers differently: windows, RoPE, experts, chunks, temperatures."""
    layers, experts, family = [config.layer(i) for i in range(config.n_layers)], config.experts, FAMILIES[config.family]
    window = min((layer.window for layer in layers if layer.window is not None), default=n_tokens)
    if window < n_tokens:
        yield f"llama.cpp reads no sliding_window for {config.family}, this configuration has {window}"
    interval = family.rope_interval
    if interval and [layer.rope for layer in layers] != [(i + 1) % interval != 0 for i in range(len(layers))]:
        yield f"llama.cpp skips RoPE in every fourth layer of {config.family}, no_rope_layers has other layers"
    normalises = family.norm_topk_prob
    if experts is not None and normalises is not None and experts.norm_topk_prob != normalises:
        said = str(experts.norm_topk_prob).lower()
        yield f"llama.cpp hard-codes norm_topk_prob for {config.family}, this configuration has {said}"
    if normalises is not None and not all(layer.experts for layer in layers):
        yield f"llama.cpp has experts in all layers of {config.family}, mlp_only_layers or decoder_sparse_step differ"
    if family.chunk is not None:
        yield from _reasons_of_chunks(config, family.chunk, n_tokens)
    if family.temperature is not None:
        yield from _reasons_of_temperature(config, family.temperature, n_tokens)
    if family.sparse == "listed":
        yield from _reasons_of_lists(config, family)
    yield from _reasons_of_shapes(config, family)


def _reasons_of_shapes(config: ModelConfig, family: Family) -> Iterator[str]:
    """Yield the reasons why llama.cpp cannot hold the model's tensors: delta nets, biases, widths, tied output."""
    net = config.delta_net
    if net is not None and net.key_head_dim != net.value_head_dim:
        yield (
            f"llama.cpp expects delta nets with keys as wide as values, linear_key_head_dim is {net.key_head_dim}, "
            f"linear_value_head_dim {net.value_head_dim}"
        )
    if config.o_bias and not family.reads_o_bias:
        yield f"llama.cpp reads a bias of attn_output only for the llama family, got {config.family}"
    width = config.hidden_size
    if config.q_width != width and family.same_width:
        yield f"llama.cpp expects {config.family} heads with a total width of {width}, got {config.q_width}"
    if config.tie_word_embeddings and family.untied:
        yield f"llama.cpp expects an output matrix for {config.family}, this configuration has tie_word_embeddings"


def _reasons_of_chunks(config: ModelConfig, theirs: int, n_tokens: int) -> Iterator[str]:
    """Yield the reasons why llama.cpp's chunk, `theirs`, changes a run of `n_tokens`."""
    layers = [config.layer(i) for i in range(config.n_layers)]
    for chunk in (layer.chunk or math.inf for layer in layers if layer.rope):
        if chunk != theirs and min(chunk, theirs) < n_tokens:
            said = "none" if chunk == math.inf else chunk
            yield f"llama.cpp hard-codes attention_chunk_size {theirs}, this configuration has {said}"


def _reasons_of_temperature(config: ModelConfig, theirs: Temperature, n_tokens: int) -> Iterator[str]:
    """Yield the reason, if any, why llama.cpp's temperature, `theirs`, changes a run of `n_tokens`."""
    layers, ours = [config.layer(i) for i in range(config.n_layers)], config.temperature
    same = ours == theirs and all(layer.has_attention_temperature != layer.rope for layer in layers)
    if not same and n_tokens >= min(theirs.floor, theirs.floor if ours is None else ours.floor):
        yield (
            f"llama.cpp hard-codes floor_scale {theirs.floor} and attn_scale {theirs.scale}, this configuration has "
            "other values"
        )


def _reasons_of_lists(config: ModelConfig, family: Family) -> Iterator[str]:
    """Yield the reasons why llama.cpp expects experts, or norms of heads, in other layers."""
    layers = [config.layer(i) for i in range(config.n_layers)]
    if config.experts is None:
        yield f"llama.cpp cannot run {config.family} without experts"
        return
    norms = config.experts.n_experts != family.no_head_norm
    if any(layer.rope and layer.head_norm != norms for layer in layers):
        yield (
            f"llama.cpp normalises heads unless there are {family.no_head_norm} experts, use_qk_norm differs for "
            f"{config.experts.n_experts} experts"
        )
    step = next((i + 1 for i, layer in enumerate(layers) if layer.experts), 0)
    if [layer.experts for layer in layers] != [step > 0 and (i + 1) % step == 0 for i in range(len(layers))]:
        yield "llama.cpp expects experts in every n-th layer, moe_layers has other layers"
