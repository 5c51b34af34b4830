"""The forward pass of every family: the dense page, with parts of other pages where a layer is another.

    llorch.model.forward     the loop, the dense block, attention and feed-forward: Llama, Qwen2, Qwen3
    experts            a router, and a few of many feed-forward parts: the MoE models of Qwen
    gated_attention    attention whose context is gated: Qwen3-Next, Qwen3.5
    delta_net          the gated delta net in place of attention: Qwen3-Next, Qwen3.5
    positions          windows, layers without RoPE, temperature: Mistral, Qwen2, SmolLM3, Ministral 3
    llama4             what Llama 4 does otherwise in both parts

A page has a function that stands where `attention` stands in the dense block, called with the same arguments, or one
that stands where `feed_forward` does.
"""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from jaxtyping import Float, Int

from llorch.families.config import ModelConfig
from llorch.files import Weights
from llorch.model.blocks import llama4
from llorch.model.blocks.delta_net import delta_net
from llorch.model.blocks.experts import experts
from llorch.model.blocks.gated_attention import gated_attention
from llorch.model.blocks.positions import attention as attention_by_position
from llorch.model.cache import KVCache
from llorch.model.forward import Keep
from llorch.model.forward import forward as run_blocks


def forward(
    ids: Int[np.ndarray, " seq"],
    weights: Weights,
    cache: KVCache,
    *,
    keep: Keep = lambda name, array: array,
    last_only: bool = False,
) -> Float[np.ndarray, "rows vocab"]:
    """Run new tokens through a model of any family; see `llorch.model.forward.forward`."""
    return run_blocks(ids, weights, cache, keep=keep, last_only=last_only, parts_of=parts_of)


def parts_of(config: ModelConfig, layer: int, positions: Int[np.ndarray, " seq"]) -> Mapping[str, Callable]:
    """Pick the parts of a layer that are not the dense ones: `mix` replaces attention, `feed` the feed-forward."""
    this, parts = config.layer(layer), dict[str, Callable]()
    if this.mixer == "delta_net":
        parts["mix"] = delta_net
    elif config.attention_gate:
        parts["mix"] = gated_attention
    elif config.interleaved_rope_hf:
        parts["mix"] = partial(llama4.attention, layer=this, positions=positions)
    elif this.looks_at_positions:
        parts["mix"] = partial(attention_by_position, layer=this, positions=positions)
    if config.experts is not None and this.experts:
        feed = llama4.experts if config.experts.scaled_inputs else experts
        parts["feed"] = partial(feed, settings=config.experts)
    return parts
