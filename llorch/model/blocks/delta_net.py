"""Gated delta net in place of attention: its state is one matrix per head for any number of tokens.

    q, k, v    = silu(short convolution of (h in_qkv^T)), q and k scaled to length 1
    read       = delta rule: decay by log_decay, correct by beta, read by q
    out        = (rms_norm(read) * silu(h in_z^T)) out_proj^T         norm of each head, gain as stored (no 1 +)

There are no positions: only the decay distinguishes old tokens. A pass leaves the last inputs of the convolution and
the matrices to the next pass.

Source: arXiv:2412.06464; transformers `modeling_{qwen3_next,qwen3_5}.py`.
"""

import numpy as np

from llorch.families.config import ModelConfig
from llorch.model.cache import DeltaState
from llorch.model.forward import Hidden, Keep, Table, Tensors
from llorch.ops.delta_rule import delta_rule, delta_rule_in_chunks, l2_norm, log_decay
from llorch.ops.linear import linear
from llorch.ops.rms_norm import rms_norm
from llorch.ops.short_conv import next_state, short_conv
from llorch.ops.sigmoid import sigmoid
from llorch.ops.swiglu import swiglu


def delta_net(
    h: Hidden, w: Tensors, config: ModelConfig, cos: Table, sin: Table, memory: DeltaState, keep: Keep
) -> Hidden:
    """Project, convolve, update and read the state, gate, project back."""
    x = keep("qkv_in", linear(h, w["in_qkv"]))
    z, b, a = (
        keep(name, linear(h, w[matrix])) for name, matrix in (("z_in", "in_z"), ("b_in", "in_b"), ("a_in", "in_a"))
    )
    conv_state, memory.conv = memory.conv, keep("conv_state", next_state(memory.conv, x))
    q, k, v = heads(keep("conv_out", short_conv(x, w["conv"], conv_state)), config)
    q, k = keep("q_l2", l2_norm(q)), keep("k_l2", l2_norm(k))
    beta = keep("beta", sigmoid(b))
    g = keep("log_decay", log_decay(a, w["dt_bias"], w["decay"]))
    rule = delta_rule if len(h) == 1 else delta_rule_in_chunks
    out, state = rule(q, k, v, beta, g, memory.delta)
    memory.delta, out = keep("delta_state", state), keep("delta_out", out)
    normed = rms_norm(out, w["delta_norm"], eps=config.rms_norm_eps).reshape(z.shape)  # (seq, value_width)
    return keep("linear_out", linear(keep("gated_norm", swiglu(z, normed)), w["out_proj"]))


def heads(channels: np.ndarray, config: ModelConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split channels, in this order, into queries, keys and values of every head, (seq, heads, width)."""
    net, seq = config.delta_net, len(channels)
    assert net is not None
    q, k, v = np.split(channels, (net.key_width, 2 * net.key_width), axis=1)
    q, k = (x.reshape(seq, net.n_key_heads, -1) for x in (q, k))
    return q, k, v.reshape(seq, net.n_value_heads, -1)
