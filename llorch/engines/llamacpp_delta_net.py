"""Which nodes of llama.cpp are the stages of a delta net, and how their bytes become the arrays of the table.

Its rule is one fused operation on the CPU, of which both parts are views with names. Queries and keys come out of their
L2 norm as a SCALE behind an RMS_NORM that has no name. In memory a state is (value, key) of each head, a convolution's
state has the channel first. The files of Qwen3.5 have value heads in another order than Hugging Face: head j of every
key head in turn (tiled), not all heads of one key head (grouped); those of Qwen3-Next do not, but their b and a are one
matrix.

Source: llama.cpp `src/models/{delta-net-base,qwen3next,qwen35,qwen35moe}.cpp`, `conversion/qwen.py`.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from llorch.families.config import FAMILIES, ModelConfig
from llorch.families.layers import DeltaNet

B_AND_A = "b_and_a"  # of Qwen3-Next: of every key head its b, then its a
Rule = tuple[str, str, str | None, str | None]


def delta_net_rules(config: ModelConfig) -> Iterator[Rule]:
    """Stage, operation, name without its layer, and source of the nodes of one layer."""
    yield "qkv_in", "MUL_MAT", None, "blk.{i}.attn_qkv.weight"
    yield "z_in", "MUL_MAT", "z", "blk.{i}.attn_gate.weight"
    if FAMILIES[config.family].fused_projections:
        yield B_AND_A, "MUL_MAT", "linear_attn_mixed_ba", "blk.{i}.ssm_ba.weight"
        yield "beta", "SIGMOID", None, "b-{i} (cont)"
    else:
        yield "b_in", "MUL_MAT", None, "blk.{i}.ssm_beta.weight"
        yield "a_in", "MUL_MAT", None, "blk.{i}.ssm_alpha.weight"
        yield "beta", "SIGMOID", "beta_sigmoid", None
    yield "conv_state", "CPY", None, "conv_state_last-{i}"
    yield "conv_out", "SILU", "conv_output_silu", None
    yield "q_l2", "SCALE", None, "q_conv-{i}"
    yield "k_l2", "SCALE", None, "k_conv-{i}"
    yield "log_decay", "MUL", "gate", "blk.{i}.ssm_a"
    yield "delta_state", "VIEW", "new_state", None
    yield "delta_out", "VIEW", "attn_output", None
    yield "gated_norm", "RESHAPE", "final_output", None
    yield "linear_out", "MUL_MAT", "linear_attn_out", "blk.{i}.ssm_out.weight"


def delta_net_stages(short: str, array: np.ndarray, config: ModelConfig) -> Mapping[str, np.ndarray]:
    """Split a node into its stages, in the table's shapes and Hugging Face's order of heads; none for other nodes."""
    net = config.delta_net
    if net is None:
        return {}
    match short:
        case "b_and_a":
            of_key_heads = array.reshape(array.shape[-2], net.n_key_heads, 2, -1)
            return {"b_in": _heads_joined(of_key_heads[:, :, 0]), "a_in": _heads_joined(of_key_heads[:, :, 1])}
        case "qkv_in" | "conv_out":
            return {short: _channels(array.reshape(-1, net.conv_width), net, config)}
        case "conv_state":
            return {short: _channels(array.reshape(net.conv_width, -1).T, net, config)}
        case "b_in" | "a_in" | "beta" | "log_decay":
            return {short: _heads(array.reshape(-1, net.n_value_heads), 1, net, config)}
        case "q_l2" | "k_l2":
            return {short: array.reshape(-1, net.n_key_heads, net.key_head_dim)}
        case "delta_state":
            states = array.reshape(net.n_value_heads, net.value_head_dim, net.key_head_dim)
            return {short: _heads(states, 0, net, config).swapaxes(1, 2)}
        case "delta_out" | "z_in" | "gated_norm":
            heads = _heads(array.reshape(-1, net.n_value_heads, net.value_head_dim), 1, net, config)
            return {short: heads if short == "delta_out" else _heads_joined(heads)}
        case _:
            return {}


def _heads_joined(heads: np.ndarray) -> np.ndarray:
    return heads.reshape(len(heads), -1)


def _channels(rows: np.ndarray, net: DeltaNet, config: ModelConfig) -> np.ndarray:
    """Order the channels of the convolution as the engine orders the heads of values."""
    values = rows[:, 2 * net.key_width :].reshape(len(rows), net.n_value_heads, net.value_head_dim)
    return np.concatenate([rows[:, : 2 * net.key_width], _heads_joined(_heads(values, 1, net, config))], axis=1)


def _heads(array: np.ndarray, axis: int, net: DeltaNet, config: ModelConfig) -> np.ndarray:
    """Bring the axis of value heads into Hugging Face's order."""
    if FAMILIES[config.family].fused_projections:  # others are tiled
        return array
    before, after = array.shape[:axis], array.shape[axis + 1 :]
    tiled = array.reshape(*before, -1, net.n_key_heads, *after)
    return tiled.swapaxes(axis, axis + 1).reshape(array.shape)
