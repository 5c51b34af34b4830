"""The torch model of every family: dense modules, with replacements where a layer differs.

    causal_lm          the loop over layers, the dense block with attention and feed-forward: Llama, Qwen2, Qwen3
    experts            mixture of experts with a router: the MoE models of Qwen, Llama 4
    delta_net          the gated delta net in place of attention, with the rule of `delta_rule`: Qwen3-Next, Qwen3.5
    positions          windows, chunks, layers without RoPE, temperature: Mistral, Qwen2, SmolLM3, Ministral 3, Llama 4;
                       attention with an output gate: Qwen3-Next, Qwen3.5

A replacement has its name in transformers and the interface of the dense module.
"""

from collections.abc import Mapping

from torch import nn

from llorch.families.config import ModelConfig
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.models.delta_net import GatedDeltaNet
from llorch.pytorch.models.experts import Llama4Moe, SparseMoe
from llorch.pytorch.models.positions import AttentionByPosition, GatedAttention


def build(config: ModelConfig) -> CausalLM:
    """Build the modules of a model of any family, without weights."""
    return CausalLM(config, parts_of)


def parts_of(config: ModelConfig, layer: int) -> Mapping[str, nn.Module]:
    """Build the modules that replace dense modules in a layer, by name."""
    layer_config, parts = config.layer(layer), dict[str, nn.Module]()
    if layer_config.mixer == "delta_net":
        parts["linear_attn"] = GatedDeltaNet(config, layer)
    elif config.attention_gate:
        parts["self_attn"] = GatedAttention(config, layer)
    elif layer_config.uses_positions or config.interleaved_rope_hf:
        parts["self_attn"] = AttentionByPosition(config, layer)
    if layer_config.experts:
        has_scaled_inputs = config.experts is not None and config.experts.scaled_inputs
        parts["mlp"] = Llama4Moe(config) if has_scaled_inputs else SparseMoe(config)
    return parts
