"""Known mistakes in gated attention: rows and activation of the gate, partial RoPE; `mistake` explains the fields."""

import numpy as np

from llorch.diagnosis.mistakes.in_stage import ROTATED, rotated_heads
from llorch.diagnosis.mistakes.mistake import Mistake
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.families.config import ModelConfig
from llorch.ops.linear import linear
from llorch.ops.rope import frequencies, rope
from llorch.ops.sigmoid import sigmoid


def _heads(s: StageInputs) -> np.ndarray:
    """Reshape queries and gates to (seq, heads, 2, head_dim), the query before the gate."""
    return s["q_gate_proj"].reshape(len(s["q_gate_proj"]), -1, 2, s.config.head_dim)


def _in_halves(s: StageInputs, half: int) -> np.ndarray:
    """Read rows as all queries, then all gates; return one half."""
    return np.split(s["q_gate_proj"], 2, axis=1)[half]


def _has_partial_rope(config: ModelConfig) -> bool:
    """Tell if RoPE rotates only a part of each head."""
    return config.rotated < config.head_dim


def _rotate(s: StageInputs, x: np.ndarray, inv_freq: np.ndarray) -> np.ndarray:
    angle = s.positions[:, None] * inv_freq
    return rope(x, np.cos(angle), np.sin(angle))


def last_part_rotated(s: StageInputs, stage: str) -> np.ndarray:
    """Rotate the end of each head instead of its beginning."""
    unrotated, tail = np.split(rotated_heads(s, stage), [s.config.head_dim - s.config.rotated], axis=-1)
    return np.concatenate([unrotated, _rotate(s, tail, frequencies(s.config.rotated, s.config.rope_theta))], axis=-1)


def gates_first(s: StageInputs, stage: str) -> np.ndarray:
    """Put the gate's rows of every head before the query's."""
    rows = linear(s["attn_norm"], s.weights["q_proj"])
    return rows.reshape(len(rows), -1, 2, s.config.head_dim)[:, :, ::-1].reshape(rows.shape)


GATED_ATTENTION: tuple[Mistake[StageInputs], ...] = (
    Mistake(
        name="gates-before-queries", stages=("q_gate_proj",), wrong=gates_first,
        diagnosis="The first rows of each head in q_proj were used as the gate; the query comes first.",
    ),
    Mistake(
        name="gates-not-normalised-input", stages=("q_gate_proj",), reads=("block_in",),
        wrong=lambda s, _: linear(s["block_in"], s.weights["q_proj"]),
        diagnosis="q_proj was given the block's input; it is normalised first.",
    ),
    Mistake(
        name="gate-taken-for-query", stages=("q_norm",), applies_to=lambda config: config.attention_gate,
        wrong=lambda s, _: s.rms_norm(_heads(s)[:, :, 1], "q_norm"),
        diagnosis="The gates were used as queries; in the rows of each head the query comes first.",
    ),
    Mistake(
        name="query-and-gate-in-halves", stages=("q_norm",), applies_to=lambda config: config.attention_gate,
        wrong=lambda s, _: s.rms_norm(_in_halves(s, 0).reshape(_heads(s)[:, :, 0].shape), "q_norm"),
        diagnosis="The first half of q_proj's rows was used as the queries; query and gate alternate, head by head.",
    ),
    Mistake(
        name="query-taken-for-gate", stages=("attn_gate",), wrong=lambda s, _: _gate_factor(_heads(s)[:, :, 0]),
        diagnosis="The queries were used as gates; in the rows of each head the gate comes last.",
    ),
    Mistake(
        name="gate-in-halves", stages=("attn_gate",), wrong=lambda s, _: sigmoid(_in_halves(s, 1)),
        diagnosis="The second half of q_proj's rows was used as the gates; query and gate alternate, head by head.",
    ),
    Mistake(
        name="gate-sigmoid-missing", stages=("attn_gate",),
        wrong=lambda s, _: _heads(s)[:, :, 1].reshape(len(s["q_gate_proj"]), -1),
        diagnosis="The gate was used as projected; it goes through a sigmoid.",
    ),
    Mistake(
        name="gate-silu", stages=("attn_gate",),
        wrong=lambda s, _: _gate_factor(_heads(s)[:, :, 1]) * _heads(s)[:, :, 1].reshape(len(s["q_gate_proj"]), -1),
        diagnosis="The gate went through SiLU; attention is gated by a sigmoid.",
    ),
    Mistake(
        name="gate-not-applied", stages=("attn_gated",), wrong=lambda s, _: s["attn_context"],
        diagnosis="The gate was not applied; multiply the context by it.",
    ),
    Mistake(
        name="gate-added", stages=("attn_gated",), wrong=lambda s, _: s["attn_context"] + s["attn_gate"],
        diagnosis="The gate was added; it is multiplied.",
    ),
    Mistake(
        name="gate-closed", stages=("attn_gated",), wrong=lambda s, _: s["attn_context"] * (1 - s["attn_gate"]),
        diagnosis="The context was multiplied by 1 - gate.",
    ),
    Mistake(
        name="rope-over-full-head", stages=ROTATED, applies_to=_has_partial_rope,
        wrong=lambda s, stage: _rotate(
            s, rotated_heads(s, stage), frequencies(s.config.head_dim, s.config.rope_theta)
        ),
        diagnosis="The whole head was rotated; this model's partial_rotary_factor rotates only a part.",
    ),
    Mistake(
        name="rope-partial-by-head-dim", stages=ROTATED, applies_to=_has_partial_rope,
        wrong=lambda s, stage: _rotate(
            s, rotated_heads(s, stage), frequencies(s.config.head_dim, s.config.rope_theta)[: s.config.rotated // 2]
        ),
        diagnosis="Frequencies fell by head_dim; the exponent is 2 * j / the width that is rotated.",
    ),
    Mistake(
        name="rope-last-part", stages=ROTATED, applies_to=_has_partial_rope, wrong=last_part_rotated,
        diagnosis="The last part of each head was rotated; rotate the first part.",
    ),
)  # fmt: skip


def _gate_factor(gate: np.ndarray) -> np.ndarray:
    return sigmoid(gate.reshape(len(gate), -1))
