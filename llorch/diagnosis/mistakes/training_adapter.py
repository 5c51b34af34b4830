"""Known mistakes in LoRA (delta, merging, adapter files): each maps a right function of llorch to a wrong one."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from llorch.diagnosis.mistakes.mistake import Mistake, training_mistake
from llorch.diagnosis.mistakes.planting import Function, Replacement
from llorch.diagnosis.mistakes.projection import has_paired_rows
from llorch.lora.adapter import Adapter

DELTA, SCALING = "llorch.ops.lora.lora_delta", "llorch.lora.config.LoraConfig.scaling_of"
BACK = "llorch.ops.lora.lora_backward"  # for `along`: backward pass with the same mistake, see `mistake`
MERGE = "llorch.lora.merge.merged_matrix"


def scaled_twice(right: Function) -> Function:
    """Apply the scale to A x, and again to B A x."""
    return lambda *arrays, scaling, **kw: right(*arrays, scaling=scaling * scaling, **kw)


def not_scaled(right: Function) -> Function:
    """Leave B A x unscaled."""
    return lambda *arrays, scaling: right(*arrays, scaling=1.0)


def alpha_not_divided(right: Function) -> Function:
    """Use alpha as the scale."""
    return lambda config, target: config.alpha_of(target)


def rank_of_default(right: Function) -> Function:
    """Divide every alpha by the adapter's default rank."""
    return lambda config, target: right(config, target) * config.rank_of(target) / config.r


def alpha_of_default(right: Function) -> Function:
    """Use one alpha for all matrices."""
    return lambda config, target: right(config, target) * config.lora_alpha / config.alpha_of(target)


def rslora_ignored(right: Function) -> Function:
    """Divide alpha by the rank instead of its square root."""
    return lambda config, target: right(replace(config, use_rslora=False), target)


def misread_transposed(array: np.ndarray) -> np.ndarray:
    """Read the buffer of a matrix in the order of its transpose."""
    return np.ascontiguousarray(array.reshape(array.shape[::-1]).T)


def misread_transposed_back(grad: np.ndarray) -> np.ndarray:
    """Compute the gradient of the input of `misread_transposed` from the gradient of its output."""
    return np.ascontiguousarray(grad.T).reshape(grad.shape)


def a_transposed(right: Function) -> Function:
    """Read the buffer of A as (in, r)."""
    return lambda x, lora_A, lora_B, *, scaling: right(x, misread_transposed(lora_A), lora_B, scaling=scaling)


def b_transposed(right: Function) -> Function:
    """Read the buffer of B as (r, out)."""
    return lambda x, lora_A, lora_B, *, scaling: right(x, lora_A, misread_transposed(lora_B), scaling=scaling)


def a_transposed_back(right: Function) -> Function:
    """Compute the gradient of `a_transposed`."""

    def wrong(grad: np.ndarray, x: np.ndarray, lora_A: np.ndarray, lora_B: np.ndarray, *, scaling: float) -> tuple:
        d_x, d_A, d_B = right(grad, x, misread_transposed(lora_A), lora_B, scaling=scaling)
        return d_x, misread_transposed_back(d_A), d_B

    return wrong


def b_transposed_back(right: Function) -> Function:
    """Compute the gradient of `b_transposed`."""

    def wrong(grad: np.ndarray, x: np.ndarray, lora_A: np.ndarray, lora_B: np.ndarray, *, scaling: float) -> tuple:
        d_x, d_A, d_B = right(grad, x, lora_A, misread_transposed(lora_B), scaling=scaling)
        return d_x, d_A, misread_transposed_back(d_B)

    return wrong


def dropped_at_evaluation(right: Function) -> Function:
    """Drop a tenth of the input at evaluation, as dropout does in training."""

    def wrong(x: np.ndarray, lora_A: np.ndarray, lora_B: np.ndarray, *, scaling: float) -> np.ndarray:
        mask = np.random.default_rng(0).random(x.shape) >= 0.1
        return right((x * mask / 0.9).astype(x.dtype), lora_A, lora_B, scaling=scaling)

    return wrong


def delta_missing(right: Function) -> Function:
    """Use the base matrix alone, without the adapter."""
    return lambda *arrays, scaling: right(*arrays, scaling=0.0)


def left_out(names: Collection[str]) -> Replacement:
    """Make the replacement that gives the adapters of some matrices (canonical names) no effect."""
    return lambda right: lambda config, target: 0.0 if target.name in names else right(config, target)


def merged_twice(right: Function) -> Function:
    """Add the product to weights that already contain it."""
    return lambda weight, *args, **kw: right(right(weight, *args, **kw), *args, **kw)


def merged_unscaled(right: Function) -> Function:
    """Merge W + B A, without the scale."""

    def wrong(weight: np.ndarray, adapter: Adapter, name: str, **kw: object) -> np.ndarray:
        merged = right(weight, adapter, name, **kw)
        return (weight + (merged - weight) / np.float32(adapter.scaling(name))).astype(np.float32)

    return wrong


def merged_subtracted(right: Function) -> Function:
    """Subtract the product instead of adding it."""
    return lambda weight, adapter, name, **kw: weight - (right(weight, adapter, name, **kw) - weight)


def rows_not_permuted(right: Function) -> Function:
    """Leave the rows of B in Hugging Face order, not in the pairs of a GGUF file."""
    return lambda array, n_heads: array


def one_alpha(right: Function) -> Function:
    """Write the adapter's default alpha for all matrices, as llama.cpp's converter does."""
    return lambda adapter: adapter.config.lora_alpha


ADAPTER: tuple[Mistake[Any], ...] = (
    training_mistake("lora-scaled-twice", ("lora_delta",), DELTA, scaled_twice,
        "The product was multiplied by the scale twice, alpha^2 / r^2; it is scaled once.", along=(BACK, scaled_twice)),
    training_mistake("lora-not-scaled", ("lora_delta",), DELTA, not_scaled,
        "B A x was added without its scale; multiply it by alpha / r.", along=(BACK, not_scaled)),
    training_mistake("lora-alpha-not-divided", ("lora_delta",), SCALING, alpha_not_divided,
        "The scale is alpha itself; it is alpha divided by the rank."),
    training_mistake("lora-rank-pattern-ignored", ("lora_delta",), SCALING, rank_of_default,
        "Alpha was divided by the rank of the configuration; rank_pattern gives this matrix another rank."),
    training_mistake("lora-alpha-pattern-ignored", ("lora_delta",), SCALING, alpha_of_default,
        "All matrices got the same alpha; alpha_pattern gives some another, which vLLM ignores, too."),
    training_mistake("lora-rslora-ignored", ("lora_delta",), SCALING, rslora_ignored,
        "Alpha was divided by the rank; with use_rslora it is divided by the root of the rank.", cases=("rslora",)),
    training_mistake("lora-a-transposed", ("lora_delta",), DELTA, a_transposed,
        "A was read as (in, r), MLX's order; PEFT stores it as (r, in).", along=(BACK, a_transposed_back)),
    training_mistake("lora-b-transposed", ("lora_delta",), DELTA, b_transposed,
        "B was read as (r, out), MLX's order; PEFT stores it as (out, r).", along=(BACK, b_transposed_back)),
    training_mistake("lora-dropout-at-evaluation", ("lora_delta",), DELTA, dropped_at_evaluation,
        "Parts of the adapter's input were dropped; dropout is for training steps and off everywhere else."),
    training_mistake("lora-delta-missing", ("lora_delta",), DELTA, delta_missing,
        "The adapter has no effect: its names did not match, or it is not active.", along=(BACK, delta_missing)),
    training_mistake("merge-twice", ("merged_weight", "merged_logits"), MERGE, merged_twice,
        "The adapter was added to weights into which it was merged before."),
    training_mistake("merge-without-scale", ("merged_weight", "merged_logits"), MERGE, merged_unscaled,
        "B A was added to the weight; add scaling * B A."),
    training_mistake("merge-subtracted", ("merged_weight", "merged_logits"), MERGE, merged_subtracted,
        "The product was subtracted from the weight, as in unmerging; merging adds it."),
    training_mistake("export-b-rows-not-permuted", ("adapter_file", "exported_logits"),
        "llorch.lora.targets.interleave", rows_not_permuted,
        "B of q and k has the rows of Hugging Face; files of the llama family hold them in pairs, and llama.cpp says "
        "nothing of the difference.", applies_to=has_paired_rows),
    training_mistake("export-one-alpha", ("adapter_file", "exported_logits"), "llorch.lora.gguf_format.common_alpha",
        one_alpha,
        "One alpha was written for all matrices; where rank-stabilised LoRA or alpha_pattern give them other scales, "
        "the scale is multiplied into B and no alpha is written."),
)  # fmt: skip
