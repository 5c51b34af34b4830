"""Known mistakes in RMSNorm (statistic, eps, gain) and Qwen3's norms of queries and keys; fields: see `mistake`."""

from collections.abc import Callable

import numpy as np

from llorch.diagnosis.mistakes.in_stage import HEAD_NORMS, NORMS, normalised_rows
from llorch.diagnosis.mistakes.mistake import Mistake
from llorch.diagnosis.mistakes.planting import Replacement, instead
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.families.config import ModelConfig

EVERYWHERE = tuple(NORMS)
PART = "rms_norm"  # function that `wrong` replaces, see `in_stage`; else `wrong` computes the stage


def _mean_square(x: np.ndarray) -> np.ndarray:
    return np.mean(x * x, axis=-1, keepdims=True)


def _divide_by(divisor: Callable[[np.ndarray, float], np.ndarray]) -> Replacement:
    """Make the replacement that divides rows by a function of the rows and eps, then multiplies by the gain."""
    return instead(lambda x, weight, eps: x / divisor(x, eps) * weight)


def layer_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Subtract the mean before the norm, as LayerNorm does."""
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt(_mean_square(x) + eps) * weight


def squares_in_half(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Compute squares and their mean in float16."""
    with np.errstate(over="ignore"):  # activations above 255 overflow: this is the mistake
        squares = x.astype(np.float16) ** 2
        mean_square = squares.astype(np.float64).mean(axis=-1, keepdims=True).astype(np.float16)
    return x / np.sqrt(mean_square + eps) * weight


def gain_of_other_norm(s: StageInputs, stage: str) -> np.ndarray:
    """Multiply by the gain of the layer's other norm of the same width."""
    other_norm = {"attn_norm": "ffn_norm", "ffn_norm": "attn_norm", "q_norm": "k_norm", "k_norm": "q_norm"}[stage]
    x = normalised_rows(s, stage)
    return x / np.sqrt(_mean_square(x) + s.config.rms_norm_eps) * s.weights[other_norm]


def heads_together(s: StageInputs, stage: str) -> np.ndarray:
    """Normalise all heads of a token together."""
    x = normalised_rows(s, stage)
    return x / np.sqrt(np.mean(x * x, axis=(-2, -1), keepdims=True) + s.config.rms_norm_eps) * s.weights[stage]


def _with_eps(wrong_eps: float) -> Replacement:
    return lambda right: lambda x, weight, eps: right(x, weight, eps=wrong_eps)


def twice(right: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Apply the norm a second time, to its own output."""
    return lambda x, weight, eps: right(right(x, weight, eps=eps), weight, eps=eps)


def _has_large_eps(config: ModelConfig) -> bool:
    return config.rms_norm_eps > 5e-6  # 1e-5, not 1e-6


NORM: tuple[Mistake[StageInputs], ...] = (
    Mistake(
        name="norm-is-layer-norm", stages=EVERYWHERE, part=PART, wrong=instead(layer_norm),
        diagnosis="The mean was subtracted (LayerNorm); RMSNorm divides by the root mean square and subtracts nothing.",
    ),
    Mistake(
        name="norm-eps-outside-root", stages=("attn_norm",), part=PART,
        wrong=_divide_by(lambda x, eps: np.sqrt(_mean_square(x)) + eps),
        diagnosis="eps was added after the square root; it belongs inside: sqrt(mean(x * x) + eps).",
    ),
    Mistake(
        name="norm-eps-missing", stages=("attn_norm",), part=PART, wrong=_with_eps(0.0),
        diagnosis="No eps was added; rms_norm_eps belongs inside the root, and counts where activations are small.",
    ),
    Mistake(
        name="norm-eps-1e-6-for-1e-5", stages=("attn_norm",), part=PART, wrong=_with_eps(1e-6),
        applies_to=_has_large_eps,
        diagnosis="eps was 1e-6; this model's config says 1e-5.",
    ),
    Mistake(
        name="norm-eps-1e-5-for-1e-6", stages=("attn_norm", "ffn_norm", "q_norm", "k_norm"),
        applies_to=lambda config: not _has_large_eps(config), part=PART, wrong=_with_eps(1e-5),
        diagnosis="eps was 1e-5; this model's config says 1e-6.",
    ),
    Mistake(
        name="norm-divides-by-n-minus-one", stages=EVERYWHERE, part=PART,
        wrong=_divide_by(lambda x, eps: np.sqrt(_mean_square(x) * x.shape[-1] / (x.shape[-1] - 1) + eps)),
        diagnosis="The sum of squares was divided by width - 1, as for a sample variance; divide by the width.",
    ),
    Mistake(
        name="norm-sum-for-mean", stages=EVERYWHERE, part=PART,
        wrong=_divide_by(lambda x, eps: np.sqrt(_mean_square(x) * x.shape[-1] + eps)),
        diagnosis="Rows were divided by the root of the sum of squares (L2 norm); RMSNorm takes the mean of squares.",
    ),
    Mistake(
        name="norm-root-missing", stages=EVERYWHERE, part=PART, wrong=_divide_by(lambda x, eps: _mean_square(x) + eps),
        diagnosis="Rows were divided by the mean square; the square root of it is missing.",
    ),
    Mistake(
        name="norm-over-all-tokens", stages=EVERYWHERE, part=PART,
        wrong=_divide_by(lambda x, eps: np.sqrt(np.mean(x * x) + eps)),
        diagnosis="One mean square was taken over all tokens; take one for each row.",
    ),
    Mistake(
        name="norm-squares-in-half", stages=EVERYWHERE, part=PART, wrong=instead(squares_in_half), rounds=True,
        diagnosis="Squares were summed up in float16, which rounds at 5e-4 and overflows from x = 256 on; "
        "take the mean square in float32 or wider.",
    ),
    Mistake(
        name="norm-gain-plus-one", stages=EVERYWHERE, part=PART,
        wrong=instead(lambda x, weight, eps: x / np.sqrt(_mean_square(x) + eps) * (1 + weight)),
        diagnosis="1 was added to a complete gain: files of Gemma, Qwen3-Next and Qwen3.5 store it less 1, GGUF "
        "files and other families store the gain itself.",
    ),
    Mistake(
        name="norm-gain-missing", stages=EVERYWHERE, part=PART,
        wrong=instead(lambda x, weight, eps: x / np.sqrt(_mean_square(x) + eps)),
        diagnosis="Rows were normalised but not multiplied by the learned gain.",
    ),
    Mistake(
        name="norm-gain-of-other-norm", stages=("attn_norm", "ffn_norm", *HEAD_NORMS), wrong=gain_of_other_norm,
        diagnosis="The gain of the layer's other norm was used; attn_norm and ffn_norm (and q_norm and k_norm) differ.",
    ),
    Mistake(
        name="norm-twice", stages=EVERYWHERE, part=PART, wrong=twice,
        diagnosis="The result was normalised again, gain included; normalise once.",
    ),
    Mistake(
        name="norm-skipped", stages=EVERYWHERE, part=PART, wrong=instead(lambda x, weight, eps: x),
        diagnosis="The input came out unchanged: the norm was left out.",
    ),
    Mistake(
        name="norm-of-heads-together", stages=HEAD_NORMS, wrong=heads_together,
        diagnosis="All heads of a token were normalised together; Qwen3 normalises each head separately over head_dim.",
    ),
)  # fmt: skip
