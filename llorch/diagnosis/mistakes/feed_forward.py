"""Known mistakes in the feed-forward part: input, activation, order of gate and up; `mistake` explains the fields."""

import math
from collections.abc import Callable

import numpy as np

from llorch.diagnosis.mistakes.mistake import Mistake
from llorch.diagnosis.mistakes.planting import instead
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.ops.linear import linear

PROJECTIONS = {"ffn_gate": "gate_proj", "ffn_up": "up_proj"}
GATE_AND_UP = tuple(PROJECTIONS)


def gate_and_up_swapped(right: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Exchange the two matrices."""
    return lambda **kwargs: right(**kwargs | {"gate_proj": kwargs["up_proj"], "up_proj": kwargs["gate_proj"]})


def fused_rows_alternate(s: StageInputs, stage: str) -> np.ndarray:
    """Split the fused rows (gate, then up) as if gate and up alternated."""
    fused = linear(s["ffn_norm"], np.concatenate([s.weights["gate_proj"], s.weights["up_proj"]]))
    return fused[:, 0::2] if stage == "ffn_gate" else fused[:, 1::2]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, 0
        return 1 / (1 + np.exp(-x))


def _silu(x: np.ndarray) -> np.ndarray:
    return x * _sigmoid(x)


def gelu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Compute GEGLU with the exact error function."""
    gate = gate.astype(np.float64)
    return gate * (1 + np.vectorize(math.erf)(gate / math.sqrt(2))) / 2 * up


def gelu_tanh(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Compute GEGLU with the tanh approximation."""
    gate = gate.astype(np.float64)
    return gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2 * up


def _act(name: str, wrong: Callable[[np.ndarray, np.ndarray], np.ndarray], diagnosis: str) -> Mistake[StageInputs]:
    return Mistake(name=name, stages=("ffn_act",), part="swiglu", wrong=instead(wrong), diagnosis=diagnosis)


FEED_FORWARD: tuple[Mistake[StageInputs], ...] = (
    Mistake(
        name="ffn-input-not-normalised", stages=GATE_AND_UP, reads=("attn_residual",),
        wrong=lambda s, stage: linear(s["attn_residual"], s.weights[PROJECTIONS[stage]]),
        diagnosis="The residual stream was projected; gate and up read ffn_norm.",
    ),
    Mistake(
        name="ffn-input-of-attention", stages=GATE_AND_UP, reads=("attn_norm",),
        wrong=lambda s, stage: linear(s["attn_norm"], s.weights[PROJECTIONS[stage]]),
        diagnosis="attn_norm was projected, as in models with parallel blocks; gate and up read ffn_norm, which comes "
        "after attention.",
    ),
    Mistake(
        name="ffn-input-is-attention-output", stages=GATE_AND_UP, reads=("attn_out|linear_out",),
        wrong=lambda s, stage: linear(s["attn_out|linear_out"], s.weights[PROJECTIONS[stage]]),
        diagnosis="The raw output of attention was projected; add the residual and normalise first.",
    ),
    Mistake(
        name="ffn-gate-and-up-swapped", stages=GATE_AND_UP, part="feed_forward", wrong=gate_and_up_swapped,
        diagnosis="gate_proj and up_proj were exchanged; a fused matrix holds gate, then up.",
    ),
    Mistake(
        name="ffn-fused-rows-alternate", stages=GATE_AND_UP, wrong=fused_rows_alternate,
        diagnosis="A fused matrix was cut into even and odd rows; it holds all rows of gate, then all rows of up.",
    ),
    _act("swiglu-silu-on-up", lambda gate, up: gate * _silu(up),
        "SiLU was applied to up; it belongs to gate: silu(gate) * up."),
    _act("swiglu-silu-on-both", lambda gate, up: _silu(gate) * _silu(up),
        "SiLU was applied to gate and up; up enters as it is: silu(gate) * up."),
    _act("swiglu-silu-of-product", lambda gate, up: _silu(gate * up),
        "SiLU was applied to gate * up; it belongs to gate alone: silu(gate) * up."),
    _act("swiglu-silu-twice", lambda gate, up: _silu(_silu(gate)) * up,
        "SiLU was applied to gate twice, perhaps once inside the projection."),
    _act("swiglu-sigmoid-only", lambda gate, up: _sigmoid(gate) * up,
        "sigmoid(gate) * up was computed (GLU); SiLU is gate * sigmoid(gate)."),
    _act("swiglu-relu", lambda gate, up: np.maximum(gate, 0) * up, "ReLU was used; these models have SiLU."),
    _act("swiglu-gelu", gelu, "GELU was used (exact); these models have SiLU."),
    _act("swiglu-gelu-tanh", gelu_tanh, "GELU was used (tanh approximation); these models have SiLU."),
    _act("swiglu-gelu-quick", lambda gate, up: gate * _sigmoid(gate.dtype.type(1.702) * gate) * up,
        "gate * sigmoid(1.702 * gate) was used (quick GELU); SiLU has no factor."),
    _act("swiglu-up-missing", lambda gate, up: _silu(gate), "The result is silu(gate) alone; multiply it by up."),
)  # fmt: skip
