"""What llama.cpp computes otherwise than a configuration says, so that no GGUF file can express it.

It has constants, or nothing at all, where some families have hyperparameters, and says nothing of that: its numbers
are those of another model. We compute what the configuration says; such a model is not written as a GGUF file, and
llama.cpp does not check it.

Source: llama.cpp `src/models/{llama,llama4,mistral3,qwen2,qwen2moe,qwen3moe,qwen3next,smollm3}.cpp`,
`src/models/delta-net-base.cpp`, each tried.
"""

from collections.abc import Iterator

from llorch.families.config import ModelConfig
from llorch.families.family import OUTPUT_BIAS, Family
from llorch.families.table import FAMILIES


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
    normalises = family.llamacpp.norm_topk_prob
    if experts is not None and normalises is not None and experts.norm_topk_prob != normalises:
        said = str(experts.norm_topk_prob).lower()
        yield f"llama.cpp hard-codes norm_topk_prob for {config.family}, this configuration has {said}"
    if normalises is not None and not all(layer.experts for layer in layers):
        yield f"llama.cpp has experts in all layers of {config.family}, mlp_only_layers or decoder_sparse_step differ"
    yield from _reasons_of_shapes(config, family)
    yield from family.llamacpp.limits(config, n_tokens)


def _reasons_of_shapes(config: ModelConfig, family: Family) -> Iterator[str]:
    """Yield the reasons why llama.cpp cannot hold the model's tensors: delta nets, biases, widths."""
    net = config.delta_net
    if net is not None and net.key_head_dim != net.value_head_dim:
        yield (
            f"llama.cpp expects delta nets with keys as wide as values, linear_key_head_dim is {net.key_head_dim}, "
            f"linear_value_head_dim {net.value_head_dim}"
        )
    if config.o_bias and OUTPUT_BIAS not in family.llamacpp.reads:
        yield f"llama.cpp reads a bias of attn_output only for the llama family, got {config.family}"
    width = config.hidden_size
    if config.q_width != width and family.llamacpp.same_width:
        yield f"llama.cpp expects {config.family} heads with a total width of {width}, got {config.q_width}"
