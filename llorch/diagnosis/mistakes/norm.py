"""Mistakes of RMSNorm: in the statistic, in eps, in the gain; and of Qwen3's norms of queries and keys."""

from collections.abc import Callable

import numpy as np

from llorch.config import ModelConfig
from llorch.diagnosis.mistakes.mistake import Mistake, Wrong
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.ops.rms_norm import rms_norm
from llorch.stages import STAGES

# stage, which is also the name of its gain -> what it normalises
NORMS = {stage.name: stage.dense_input for stage in STAGES if stage.function == "llorch.ops.rms_norm.rms_norm"}
HEAD_NORMS = ("q_norm", "k_norm")
EVERYWHERE = tuple(NORMS)


def _input(s: StageInputs, stage: str) -> np.ndarray:
    x = s.heads(NORMS[stage]) if stage in HEAD_NORMS else s[NORMS[stage]]
    return x.astype(np.float64)


def _mean_square(x: np.ndarray) -> np.ndarray:
    return np.mean(x * x, axis=-1, keepdims=True)


def _normed(s: StageInputs, stage: str, *, eps: float) -> np.ndarray:
    return rms_norm(_input(s, stage), s.weights[stage].astype(np.float64), eps=eps)


def _by(divisor: Callable[[np.ndarray, float], np.ndarray]) -> Wrong:
    """Make a mistake that divides rows by a function of the rows and eps, then multiplies by the gain."""

    def wrong(s: StageInputs, stage: str) -> np.ndarray:
        x = _input(s, stage)
        return x / divisor(x, s.config.rms_norm_eps) * s.weights[stage]

    return wrong


def layer_norm(s: StageInputs, stage: str) -> np.ndarray:
    """Subtract the mean before the norm, as LayerNorm does."""
    x = _input(s, stage)
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt(_mean_square(x) + s.config.rms_norm_eps) * s.weights[stage]


def squares_in_half(s: StageInputs, stage: str) -> np.ndarray:
    """Compute squares and their mean in float16."""
    x = _input(s, stage)
    with np.errstate(over="ignore"):  # activations above 255 overflow to infinity, which is the point
        squares = x.astype(np.float16) ** 2
        mean_square = squares.astype(np.float64).mean(axis=-1, keepdims=True).astype(np.float16)
    return x / np.sqrt(mean_square + s.config.rms_norm_eps) * s.weights[stage]


def gain_of_other_norm(s: StageInputs, stage: str) -> np.ndarray:
    """Multiply by the gain of the layer's other norm of the same width."""
    other = {"attn_norm": "ffn_norm", "ffn_norm": "attn_norm", "q_norm": "k_norm", "k_norm": "q_norm"}[stage]
    return _unit(s, stage) * s.weights[other]


def twice(s: StageInputs, stage: str) -> np.ndarray:
    """Apply the norm a second time, to its own output."""
    gain = s.weights[stage].astype(np.float64)
    return rms_norm(_normed(s, stage, eps=s.config.rms_norm_eps), gain, eps=s.config.rms_norm_eps)


def skipped(s: StageInputs, stage: str) -> np.ndarray:
    """Return the input without the norm."""
    return _input(s, stage)


def _unit(s: StageInputs, stage: str) -> np.ndarray:
    x = _input(s, stage)
    return x / np.sqrt(_mean_square(x) + s.config.rms_norm_eps)


def _has_large_eps(config: ModelConfig) -> bool:
    return config.rms_norm_eps > 5e-6


NORM: tuple[Mistake[StageInputs], ...] = (
    Mistake(
        name="norm-is-layer-norm", stages=EVERYWHERE, wrong=layer_norm,
        diagnosis="The mean was subtracted (LayerNorm); RMSNorm divides by the root mean square and subtracts nothing.",
    ),
    Mistake(
        name="norm-eps-outside-root", stages=("attn_norm",), wrong=_by(lambda x, eps: np.sqrt(_mean_square(x)) + eps),
        diagnosis="eps was added after the square root; it belongs inside: sqrt(mean(x * x) + eps).",
    ),
    Mistake(
        name="norm-eps-missing", stages=("attn_norm",), wrong=lambda s, stage: _normed(s, stage, eps=0.0),
        diagnosis="No eps was added; rms_norm_eps belongs inside the root, and counts where activations are small.",
    ),
    Mistake(
        name="norm-eps-1e-6-for-1e-5", stages=("attn_norm",), wrong=lambda s, stage: _normed(s, stage, eps=1e-6),
        applies_to=_has_large_eps,
        diagnosis="eps was 1e-6; this model's config says 1e-5.",
    ),
    Mistake(
        name="norm-eps-1e-5-for-1e-6", stages=("attn_norm", "ffn_norm", "q_norm", "k_norm"),
        applies_to=lambda config: not _has_large_eps(config), wrong=lambda s, stage: _normed(s, stage, eps=1e-5),
        diagnosis="eps was 1e-5; this model's config says 1e-6.",
    ),
    Mistake(
        name="norm-divides-by-n-minus-one", stages=EVERYWHERE,
        wrong=_by(lambda x, eps: np.sqrt(_mean_square(x) * x.shape[-1] / (x.shape[-1] - 1) + eps)),
        diagnosis="The sum of squares was divided by width - 1, as for a sample variance; divide by the width.",
    ),
    Mistake(
        name="norm-sum-for-mean", stages=EVERYWHERE,
        wrong=_by(lambda x, eps: np.sqrt(_mean_square(x) * x.shape[-1] + eps)),
        diagnosis="Rows were divided by the root of the sum of squares (L2 norm); RMSNorm takes the mean of squares.",
    ),
    Mistake(
        name="norm-root-missing", stages=EVERYWHERE, wrong=_by(lambda x, eps: _mean_square(x) + eps),
        diagnosis="Rows were divided by the mean square; the square root of it is missing.",
    ),
    Mistake(
        name="norm-over-all-tokens", stages=EVERYWHERE, wrong=_by(lambda x, eps: np.sqrt(np.mean(x * x) + eps)),
        diagnosis="One mean square was taken over all tokens; take one for each row.",
    ),
    Mistake(
        name="norm-squares-in-half", stages=EVERYWHERE, wrong=squares_in_half, rounds=True,
        diagnosis="Squares were summed up in float16, which rounds at 5e-4 and overflows from x = 256 on; "
        "take the mean square in float32 or wider.",
    ),
    Mistake(
        name="norm-gain-plus-one", stages=EVERYWHERE,
        wrong=lambda s, stage: _unit(s, stage) * (1 + s.weights[stage].astype(np.float64)),
        diagnosis="1 was added to a complete gain: files of Gemma, Qwen3-Next and Qwen3.5 store it less 1, GGUF "
        "files and other families store the gain itself.",
    ),
    Mistake(
        name="norm-gain-missing", stages=EVERYWHERE, wrong=lambda s, stage: _unit(s, stage),
        diagnosis="Rows were normalised but not multiplied by the learned gain.",
    ),
    Mistake(
        name="norm-gain-of-other-norm", stages=("attn_norm", "ffn_norm", *HEAD_NORMS), wrong=gain_of_other_norm,
        diagnosis="The gain of the layer's other norm was used; attn_norm and ffn_norm (and q_norm and k_norm) differ.",
    ),
    Mistake(
        name="norm-twice", stages=EVERYWHERE, wrong=twice,
        diagnosis="The result was normalised again, gain included; normalise once.",
    ),
    Mistake(
        name="norm-skipped", stages=EVERYWHERE, wrong=skipped,
        diagnosis="The input came out unchanged: the norm was left out.",
    ),
    Mistake(
        name="norm-of-heads-together", stages=HEAD_NORMS,
        wrong=_by(lambda x, eps: np.sqrt(np.mean(x * x, axis=(-2, -1), keepdims=True) + eps)),
        diagnosis="All heads of a token were normalised together; Qwen3 normalises each head separately over head_dim.",
    ),
)  # fmt: skip
