"""Mistakes of checkpoints 15 and 20: the adapter's addition, merging, and adapter files."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from llorch.diagnosis.mistakes.mistake import ONE_STEP, Mistake
from llorch.families.config import ModelConfig
from llorch.families.table import FAMILIES

Function = Callable[..., Any]
DELTA, SCALING = "llorch.ops.lora.lora_delta", "llorch.lora.config.LoraConfig.scaling_of"
BACK = "llorch.ops.lora.lora_backward"
MERGE = "llorch.lora.merge.merged_matrix"


def scaled_twice(right: Function) -> Function:
    """Apply the scale to A x, and again to B A x."""
    return lambda *arrays, scaling, **how: right(*arrays, scaling=scaling * scaling, **how)


def not_scaled(right: Function) -> Function:
    """Leave B A x unscaled."""
    return lambda *arrays, scaling: right(*arrays, scaling=1.0)


def alpha_not_divided(right: Function) -> Function:
    """Take alpha for the scale."""
    return lambda config, target: config.alpha_of(target)


def rank_of_default(right: Function) -> Function:
    """Divide every alpha by the rank of the adapter as a whole."""
    return lambda config, target: right(config, target) * config.rank_of(target) / config.r


def alpha_of_default(right: Function) -> Function:
    """Use one alpha for all matrices."""
    return lambda config, target: right(config, target) * config.lora_alpha / config.alpha_of(target)


def rslora_ignored(right: Function) -> Function:
    """Divide alpha by the rank, not by the root of the rank."""
    return lambda config, target: right(replace(config, use_rslora=False), target)


def reordered(array: np.ndarray) -> np.ndarray:
    """Read the numbers of a matrix in the order of its transpose."""
    return np.ascontiguousarray(array.reshape(array.shape[::-1]).T)


def reordered_back(grad: np.ndarray) -> np.ndarray:
    """Put the gradient of the output of `reordered` into the order of the input of `reordered`."""
    return np.ascontiguousarray(grad.T).reshape(grad.shape)


def a_transposed(right: Function) -> Function:
    """Read the numbers of A in the order of (in, r)."""
    return lambda x, lora_A, lora_B, *, scaling: right(x, reordered(lora_A), lora_B, scaling=scaling)


def b_transposed(right: Function) -> Function:
    """Read the numbers of B in the order of (r, out)."""
    return lambda x, lora_A, lora_B, *, scaling: right(x, lora_A, reordered(lora_B), scaling=scaling)


def a_transposed_back(right: Function) -> Function:
    """Compute the gradient for A in the order of (in, r)."""

    def wrong(grad: np.ndarray, x: np.ndarray, lora_A: np.ndarray, lora_B: np.ndarray, *, scaling: float) -> tuple:
        d_x, d_A, d_B = right(grad, x, reordered(lora_A), lora_B, scaling=scaling)
        return d_x, reordered_back(d_A), d_B

    return wrong


def b_transposed_back(right: Function) -> Function:
    """Compute the gradient for B in the order of (r, out)."""

    def wrong(grad: np.ndarray, x: np.ndarray, lora_A: np.ndarray, lora_B: np.ndarray, *, scaling: float) -> tuple:
        d_x, d_A, d_B = right(grad, x, lora_A, reordered(lora_B), scaling=scaling)
        return d_x, d_A, reordered_back(d_B)

    return wrong


def dropped_at_evaluation(right: Function) -> Function:
    """Drop a tenth of the input at evaluation, as in training."""

    def wrong(x: np.ndarray, lora_A: np.ndarray, lora_B: np.ndarray, *, scaling: float) -> np.ndarray:
        kept = np.random.default_rng(0).random(x.shape) >= 0.1
        return right((x * kept / 0.9).astype(x.dtype), lora_A, lora_B, scaling=scaling)

    return wrong


def delta_missing(right: Function) -> Function:
    """Use the base matrix alone, without the adapter."""
    return lambda *arrays, scaling: right(*arrays, scaling=0.0)


def merged_twice(right: Function) -> Function:
    """Add the product to weights that already contain it."""
    return lambda weight, adapter, name, **where: right(
        right(weight, adapter, name, **where), adapter, name, **where
    )  # fmt: skip


def merged_unscaled(right: Function) -> Function:
    """Merge W + B A, without the scale."""

    def wrong(weight: np.ndarray, adapter: Any, name: str, **where: object) -> np.ndarray:
        merged = right(weight, adapter, name, **where)
        return (weight + (merged - weight) / np.float32(adapter.scaling(name))).astype(np.float32)

    return wrong


def merged_subtracted(right: Function) -> Function:
    """Subtract the product instead of adding it."""

    def wrong(weight: np.ndarray, adapter: Any, name: str, **where: object) -> np.ndarray:
        return weight - (right(weight, adapter, name, **where) - weight)

    return wrong


def rows_not_permuted(right: Function) -> Function:
    """Leave the rows of B in the order of Hugging Face."""
    return lambda array, n_heads: array


def one_alpha(right: Function) -> Function:
    """Write the adapter's default alpha for all matrices, as llama.cpp's converter does."""
    return lambda adapter: adapter.config.lora_alpha


def interleaves(config: ModelConfig) -> bool:
    """Tell if GGUF files of a family hold rows of q and k in pairs."""
    return FAMILIES[config.family].layout.interleaved_rope == "gguf"


ADAPTER: tuple[Mistake[Any], ...] = (
    Mistake(
        name="lora-scaled-twice", stages=("lora_delta",), part=DELTA, wrong=scaled_twice,
        along=(BACK, scaled_twice),
        cases=ONE_STEP,
        diagnosis="The product was multiplied by the scale twice, alpha^2 / r^2; it is scaled once.",
    ),
    Mistake(
        name="lora-not-scaled", stages=("lora_delta",), part=DELTA, wrong=not_scaled,
        along=(BACK, not_scaled),
        cases=ONE_STEP,
        diagnosis="B A x was added without its scale; multiply it by alpha / r.",
    ),
    Mistake(
        name="lora-alpha-not-divided", stages=("lora_delta",), part=SCALING, wrong=alpha_not_divided,
        cases=ONE_STEP,
        diagnosis="The scale is alpha itself; it is alpha divided by the rank.",
    ),
    Mistake(
        name="lora-rank-pattern-ignored", stages=("lora_delta",), part=SCALING, wrong=rank_of_default,
        cases=ONE_STEP,
        diagnosis="Alpha was divided by the rank of the configuration; rank_pattern gives this matrix another rank.",
    ),
    Mistake(
        name="lora-alpha-pattern-ignored", stages=("lora_delta",), part=SCALING, wrong=alpha_of_default,
        cases=ONE_STEP,
        diagnosis="All matrices got the same alpha; alpha_pattern gives some another, which vLLM ignores, too.",
    ),
    Mistake(
        name="lora-rslora-ignored", stages=("lora_delta",), part=SCALING, wrong=rslora_ignored, cases=("rslora",),
        diagnosis="Alpha was divided by the rank; with use_rslora it is divided by the root of the rank.",
    ),
    Mistake(
        name="lora-a-transposed", stages=("lora_delta",), part=DELTA, wrong=a_transposed,
        along=(BACK, a_transposed_back),
        cases=ONE_STEP,
        diagnosis="A was read as (in, r), MLX's order; PEFT stores it as (r, in).",
    ),
    Mistake(
        name="lora-b-transposed", stages=("lora_delta",), part=DELTA, wrong=b_transposed,
        along=(BACK, b_transposed_back),
        cases=ONE_STEP,
        diagnosis="B was read as (r, out), MLX's order; PEFT stores it as (out, r).",
    ),
    Mistake(
        name="lora-dropout-at-evaluation", stages=("lora_delta",), part=DELTA, wrong=dropped_at_evaluation,
        cases=ONE_STEP,
        diagnosis="Parts of the adapter's input were dropped; dropout is for training steps and off everywhere else.",
    ),
    Mistake(
        name="lora-delta-missing", stages=("lora_delta",), part=DELTA, wrong=delta_missing,
        along=(BACK, delta_missing),
        cases=ONE_STEP,
        diagnosis="The adapter has no effect: its names did not match, or it is not active.",
    ),
    Mistake(
        name="merge-twice", stages=("merged_weight", "merged_logits"), part=MERGE, wrong=merged_twice,
        cases=ONE_STEP,
        diagnosis="The adapter was added to weights into which it was merged before.",
    ),
    Mistake(
        name="merge-without-scale", stages=("merged_weight", "merged_logits"), part=MERGE, wrong=merged_unscaled,
        cases=ONE_STEP,
        diagnosis="B A was added to the weight; add scaling * B A.",
    ),
    Mistake(
        name="merge-subtracted", stages=("merged_weight", "merged_logits"), part=MERGE, wrong=merged_subtracted,
        cases=ONE_STEP,
        diagnosis="The product was subtracted from the weight, as in unmerging; merging adds it.",
    ),
    Mistake(
        name="export-b-rows-not-permuted", stages=("adapter_file", "exported_logits"), applies_to=interleaves,
        part="llorch.lora.targets.interleave", wrong=rows_not_permuted,
        cases=ONE_STEP,
        diagnosis="B of q and k has the rows of Hugging Face; files of the llama family hold them in pairs, and "
        "llama.cpp says nothing of the difference.",
    ),
    Mistake(
        name="export-one-alpha", stages=("adapter_file", "exported_logits"),
        part="llorch.lora.gguf_format.common_alpha", wrong=one_alpha,
        cases=ONE_STEP,
        diagnosis="One alpha was written for all matrices; where rank-stabilised LoRA or alpha_pattern give them other "
        "scales, the scale is multiplied into B and no alpha is written.",
    ),
)  # fmt: skip
