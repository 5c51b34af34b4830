"""Attention and experts of Llama 4.

    attention   RoPE has pairs (2j, 2j + 1); then every query and key head is divided by its root mean square.
                Layers without RoPE have neither, but a temperature. Layers with RoPE attend within their chunk only.
    experts     The router selects by logits. The sigmoid of a logit multiplies the input of the expert, not its
                output. The shared expert has no gate.

Source: transformers `modeling_llama4.py`; llama.cpp `src/models/llama4.cpp`.
"""

import numpy as np
from jaxtyping import Int

from llorch.families.config import ModelConfig
from llorch.families.layers import Experts, Layer
from llorch.model.blocks.experts import chosen, shared_expert
from llorch.model.blocks.positions import attend
from llorch.model.forward import Append, Heads, Hidden, Keep, Table, Tensors, qkv
from llorch.ops.linear import linear
from llorch.ops.rms_norm import rms_norm
from llorch.ops.rope import rope_adjacent
from llorch.ops.routing import mixed, top_k
from llorch.ops.sigmoid import sigmoid


def attention(
    h: Hidden, w: Tensors, config: ModelConfig, cos: Table, sin: Table, append: Append, keep: Keep, *,
    layer: Layer, positions: Int[np.ndarray, " seq"],
) -> Hidden:  # fmt: skip
    """Project, rotate interleaved pairs, normalise heads, attend."""
    q, k, v = qkv(h, w, config, keep)
    if layer.rope:
        q = keep("q_rope", rope_adjacent(q, cos, sin))
        k = keep("k_rope", rope_adjacent(k, cos, sin))
    if layer.head_norm:
        q = keep("q_head_norm", head_norm(q, eps=config.rms_norm_eps))
        k = keep("k_head_norm", head_norm(k, eps=config.rms_norm_eps))
    return attend(q, k, v, w, config, append, keep, layer=layer, positions=positions)


def head_norm(heads: Heads, *, eps: float) -> Heads:
    """Scale every head to unit root mean square, without a trained gain."""
    return rms_norm(heads, np.ones(heads.shape[-1], heads.dtype), eps=eps)


def experts(h: Hidden, w: Tensors, keep: Keep, *, settings: Experts) -> Hidden:
    """Select experts for each token, scale their inputs by weight, sum their outputs and the shared expert's."""
    logits = keep("router_logits", linear(h, w["router"]))
    ids = keep("topk_ids", top_k(logits, settings.n_experts_per_token))
    weights = keep("topk_weights", sigmoid(np.take_along_axis(logits, ids, axis=-1)))
    outs = chosen(keep("expert_in", h[:, None] * weights[..., None]), ids, w, keep)
    return keep("moe_out", mixed(outs, np.ones_like(weights), shared_expert(h, w, keep)))
