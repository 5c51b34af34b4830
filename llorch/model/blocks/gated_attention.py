"""Attention with an element-wise gate on the context: the full-attention layers of hybrid models.

    query, gate = first and second half of each head in q_proj's output
    out         = (context * 1 / (1 + exp(-gate))) o_proj^T

Queries and keys are normalised, and RoPE rotates only the first `rotary_dim` elements of a head.

Source: arXiv:2505.06708; transformers `modeling_{qwen3_next,qwen3_5}.py`.
"""

from llorch.families.config import ModelConfig
from llorch.model.forward import Append, Hidden, Keep, Table, Tensors, attention_output
from llorch.ops.attention import attention_context, attention_probs, attention_scores
from llorch.ops.linear import linear
from llorch.ops.rms_norm import rms_norm
from llorch.ops.rope import rope
from llorch.ops.sigmoid import sigmoid


def gated_attention(
    h: Hidden, w: Tensors, config: ModelConfig, cos: Table, sin: Table, append: Append, keep: Keep
) -> Hidden:
    """Project, normalise, rotate, cache, average the values by attention, gate, project back."""
    seq, head_dim, eps = len(h), config.head_dim, config.rms_norm_eps
    q_and_gate = keep("q_gate_proj", linear(h, w["q_proj"], w.get("q_bias"))).reshape(seq, -1, 2, head_dim)
    k = keep("k_proj", linear(h, w["k_proj"], w.get("k_bias"))).reshape(seq, -1, head_dim)  # (seq, kv_heads, head_dim)
    v = keep("v_proj", linear(h, w["v_proj"], w.get("v_bias"))).reshape(seq, -1, head_dim)  # (seq, kv_heads, head_dim)
    q, gate = q_and_gate[:, :, 0], q_and_gate[:, :, 1].reshape(seq, -1)  # (seq, heads, head_dim), (seq, q_width)
    q, k = keep("q_norm", rms_norm(q, w["q_norm"], eps=eps)), keep("k_norm", rms_norm(k, w["k_norm"], eps=eps))
    q, k = keep("q_rope", rope(q, cos, sin)), keep("k_rope", rope(k, cos, sin))
    k, v = append(k, v)  # (kv_heads, ctx, head_dim): the whole context
    k, v = keep("k_cache", k), keep("v_cache", v)
    probs = keep("attn_probs", attention_probs(keep("attn_scores", attention_scores(q, k))))
    context, opened = keep("attn_context", attention_context(probs, v)), keep("attn_gate", sigmoid(gate))
    return attention_output(keep("attn_gated", context * opened), w, keep)
