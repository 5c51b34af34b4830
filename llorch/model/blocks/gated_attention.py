"""Attention whose context is multiplied by a gate, one for each number: the full-attention layers of hybrids.

    query, gate = of every head the two halves of q_proj's rows
    out         = (context * 1 / (1 + exp(-gate))) o_proj^T

Queries and keys are normalised, and RoPE turns the first `rotary_dim` numbers of a head alone.

Source: arXiv:2505.06708; transformers `modeling_{qwen3_next,qwen3_5}.py`.
"""

from llorch.families.config import ModelConfig
from llorch.model.forward import Append, Hidden, Keep, OfLayer, Table, attention_output
from llorch.ops.attention import attention_context, attention_probs, attention_scores
from llorch.ops.linear import linear
from llorch.ops.rms_norm import rms_norm
from llorch.ops.rope import rope
from llorch.ops.sigmoid import sigmoid


def gated_attention(
    h: Hidden, w: OfLayer, config: ModelConfig, cos: Table, sin: Table, append: Append, keep: Keep
) -> Hidden:
    """Project, normalise, rotate, cache, mix the values of the context, gate, project back."""
    seq, head_dim, eps = len(h), config.head_dim, config.rms_norm_eps
    both = keep("q_gate_proj", linear(h, w["q_proj"], w.get("q_bias"))).reshape(seq, -1, 2, head_dim)
    k = keep("k_proj", linear(h, w["k_proj"], w.get("k_bias"))).reshape(seq, -1, head_dim)  # (seq, kv_heads, head_dim)
    v = keep("v_proj", linear(h, w["v_proj"], w.get("v_bias"))).reshape(seq, -1, head_dim)  # (seq, kv_heads, head_dim)
    q, gate = both[:, :, 0], both[:, :, 1].reshape(seq, -1)  # (seq, heads, head_dim), (seq, q_width)
    q, k = keep("q_norm", rms_norm(q, w["q_norm"], eps=eps)), keep("k_norm", rms_norm(k, w["k_norm"], eps=eps))
    q, k = keep("q_rope", rope(q, cos, sin)), keep("k_rope", rope(k, cos, sin))
    k, v = append(k, v)  # (kv_heads, ctx, head_dim): the whole context
    k, v = keep("k_cache", k), keep("v_cache", v)
    probs = keep("attn_probs", attention_probs(keep("attn_scores", attention_scores(q, k))))
    context, opened = keep("attn_context", attention_context(probs, v)), keep("attn_gate", sigmoid(gate))
    return attention_output(keep("attn_gated", context * opened), w, keep)
