"""The torch model of every family: the dense modules, with parts of other modules where a layer is another.

    causal_lm          the loop, the dense block, attention and feed-forward: Llama, Qwen2, Qwen3
    experts            a router, and a few of many feed-forward parts: the MoE models of Qwen, Llama 4
    delta_net          the gated delta net in place of attention, by the rule of `delta_rule`: Qwen3-Next, Qwen3.5
    positions          windows, chunks, layers without RoPE, temperature: Mistral, Qwen2, SmolLM3, Ministral 3, Llama 4;
                       attention whose context is gated: Qwen3-Next, Qwen3.5

A part has the name that it has in transformers, and is called as the dense one is.
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
    """Build the parts of a layer that are not the dense parts."""
    this, parts = config.layer(layer), dict[str, nn.Module]()
    if this.mixer == "delta_net":
        parts["linear_attn"] = GatedDeltaNet(config, layer)
    elif config.attention_gate:
        parts["self_attn"] = GatedAttention(config, layer)
    elif this.looks_at_positions or config.interleaved_rope_hf:
        parts["self_attn"] = AttentionByPosition(config, layer)
    if this.experts:
        scaled = config.experts is not None and config.experts.scaled_inputs
        parts["mlp"] = Llama4Moe(config) if scaled else SparseMoe(config)
    return parts
