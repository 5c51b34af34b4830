"""The forward pass of every family: the dense forward pass, with other modules' functions in layers that differ.

    llorch.model.forward     the loop, the dense block, attention and feed-forward: Llama, Qwen2, Qwen3
    experts            mixture of experts: the MoE models of Qwen
    gated_attention    attention whose context is gated: Qwen3-Next, Qwen3.5
    delta_net          the gated delta net in place of attention: Qwen3-Next, Qwen3.5
    positions          windows, layers without RoPE, temperature: Mistral, Qwen2, SmolLM3, Ministral 3
    llama4             attention and experts of Llama 4

Each module has a function that replaces `attention` of the dense block, called with the same arguments, or one that
replaces `feed_forward`.
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
    """Return the replacements in a layer that is not dense: `mix` for attention, `feed` for the feed-forward."""
    kind, parts = config.layer(layer), dict[str, Callable]()
    if kind.mixer == "delta_net":
        parts["mix"] = delta_net
    elif config.attention_gate:
        parts["mix"] = gated_attention
    elif config.interleaved_rope_hf:
        parts["mix"] = partial(llama4.attention, layer=kind, positions=positions)
    elif kind.uses_positions:
        parts["mix"] = partial(attention_by_position, layer=kind, positions=positions)
    if config.experts is not None and kind.experts:
        feed = llama4.experts if config.experts.scaled_inputs else experts
        parts["feed"] = partial(feed, settings=config.experts)
    return parts
