"""Configurations that llama.cpp computes differently, so that no GGUF file can express them.

llama.cpp hard-codes or ignores some hyperparameters of some families without a warning, so it computes another model.
llorch follows the configuration. It does not write such a model as a GGUF file, and does not compare it with llama.cpp.

Source: llama.cpp `src/models/{llama,llama4,mistral3,qwen2,qwen2moe,qwen3moe,qwen3next,smollm3}.cpp`,
`src/models/delta-net-base.cpp`; each case was tested.
"""

from collections.abc import Iterator

from llorch.families.config import ModelConfig
from llorch.families.family import OUTPUT_BIAS, Family
from llorch.families.table import FAMILIES


def cannot_express(config: ModelConfig, n_tokens: int | None = None) -> str:
    """Explain why llama.cpp differs in runs of up to `n_tokens` (None: context length); "" if it does not."""
    return next(_layer_reasons(config, config.max_position_embeddings if n_tokens is None else n_tokens), "")


def _layer_reasons(config: ModelConfig, n_tokens: int) -> Iterator[str]:
    """Yield the reasons why llama.cpp computes layers differently: windows, RoPE, experts, chunks, temperatures."""
    layers, experts, family = [config.layer(i) for i in range(config.n_layers)], config.experts, FAMILIES[config.family]
    window = min((layer.window for layer in layers if layer.window is not None), default=n_tokens)
    if window < n_tokens:
        yield f"llama.cpp reads no sliding_window for {config.family}, this configuration has {window}"
    interval = family.rope_interval
    if interval and [layer.rope for layer in layers] != [(i + 1) % interval != 0 for i in range(len(layers))]:
        yield f"llama.cpp skips RoPE in every fourth layer of {config.family}, no_rope_layers has other layers"
    hard_coded = family.llamacpp.norm_topk_prob
    if experts is not None and hard_coded is not None and experts.norm_topk_prob != hard_coded:
        actual = str(experts.norm_topk_prob).lower()
        yield f"llama.cpp hard-codes norm_topk_prob for {config.family}, this configuration has {actual}"
    if hard_coded is not None and not all(layer.experts for layer in layers):
        yield f"llama.cpp has experts in all layers of {config.family}, mlp_only_layers or decoder_sparse_step differ"
    yield from _shape_reasons(config, family)
    yield from family.llamacpp.limits(config, n_tokens)


def _shape_reasons(config: ModelConfig, family: Family) -> Iterator[str]:
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
