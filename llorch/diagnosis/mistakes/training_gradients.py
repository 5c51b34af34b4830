"""Known mistakes in the backward pass of an op: each maps a right function of llorch to a wrong one, see `mistake`."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from llorch.diagnosis.mistakes.mistake import Mistake, training_mistake
from llorch.diagnosis.mistakes.planting import Function, Replacement
from llorch.diagnosis.mistakes.training_adapter import not_scaled
from llorch.families.config import ModelConfig
from llorch.ops.linear import linear_backward
from llorch.ops.lora import LoraMatrix
from llorch.ops.rms_norm import root_mean_square

OPS, GRADIENT = "llorch.ops.", ("gradient",)


def softmax_diagonal(right: Function) -> Function:
    """Multiply the gradient by the probabilities, without the sum over the keys."""
    return lambda grad, probs: grad * probs


def softmax_second_twice(right: Function) -> Function:
    """Use the derivative of a sigmoid instead of the derivative of a softmax."""
    return lambda grad, probs: grad * probs * (1 - probs)


def scores_not_scaled(right: Function) -> Function:
    """Omit the scale of the scores in the backward pass."""

    def wrong(grad: np.ndarray, q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, ...]:
        factor = q.dtype.type(q.shape[-1] ** 0.5)
        return tuple(array * factor for array in right(grad, q, k))

    return wrong


def keys_of_one_head(right: Function) -> Function:
    """Pass to a key only the gradient of the first query head in its group."""

    def wrong(grad: np.ndarray, q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, ...]:
        first = grad.reshape(len(k), -1, *grad.shape[1:]).copy()
        first[:, 1:] = 0
        return right(grad, q, k)[0], right(first.reshape(grad.shape), q, k)[1]

    return wrong


def values_of_one_head(right: Function) -> Function:
    """Pass to a value only the gradient of the first query head in its group."""

    def wrong(grad: np.ndarray, probs: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
        first = probs.reshape(len(v), -1, *probs.shape[1:]).copy()
        first[:, 1:] = 0
        return right(grad, probs, v)[0], right(grad, first.reshape(probs.shape), v)[1]

    return wrong


def norm_first_term(right: Function) -> Function:
    """Treat the root mean square as a constant."""
    return lambda grad, x, weight, *, eps: grad * weight / root_mean_square(x, eps)


def norm_without_gain(right: Function) -> Function:
    """Omit the gain of the norm."""
    return lambda grad, x, weight, *, eps: right(grad, x, np.ones_like(weight), eps=eps)


def turned_on(right: Function) -> Function:
    """Rotate the gradient by the positive angle."""
    return lambda grad, cos, sin: right(grad, cos, -sin)


def not_turned(right: Function) -> Function:
    """Do not rotate the gradient."""
    return lambda grad, cos, sin: grad


def silu_as_gate(right: Function) -> Function:
    """Omit the second term of SiLU's derivative: s instead of s (1 + z (1 - s))."""

    def wrong(grad: np.ndarray, gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, ...]:
        s = 1 / (1 + np.exp(-gate.astype(np.float64)))
        return (grad * up * s).astype(gate.dtype), right(grad, gate, up)[1]

    return wrong


def lora_input_left_out(right: Function) -> Function:
    """Pass no gradient from the LoRA branch to its input."""

    def wrong(*arrays: np.ndarray, scaling: float) -> tuple[np.ndarray, ...]:
        d_x, d_A, d_B = right(*arrays, scaling=scaling)
        return np.zeros_like(d_x), d_A, d_B

    return wrong


def base_left_out(right: Function) -> Function:
    """Pass no gradient through the frozen matrix."""

    def wrong(matrix: LoraMatrix, grad: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        d_x, trained = right(matrix, grad, x)
        return d_x - linear_backward(grad, matrix.base), trained

    return wrong


def left_at_zero(names: Collection[str]) -> Replacement:
    """Make the replacement of a step that leaves the gradients of some tensors (flat names) at 0."""

    def make(right: Function) -> Function:
        def wrong(*args: object, **kw: object) -> tuple[float, Mapping[str, np.ndarray]]:
            loss, grads = right(*args, **kw)
            return loss, {name: grad * (name not in names) for name, grad in grads.items()}

        return wrong

    return make


def gradient_missing(right: Function) -> Function:
    """Return a zero gradient."""
    return lambda *args, **kw: np.zeros_like(right(*args, **kw))


def residual_cut(right: Function) -> Function:
    """Pass no gradient through the residual stream around the block."""
    return lambda d_out, *args, **kw: right(d_out, *args, **kw) - d_out


def rows_for_tokens(right: Function) -> Function:
    """Divide by the number of a document's rows instead of the step's number of tokens in the loss."""
    return lambda logits, labels, **kw: right(logits, labels, **kw | {"n_trained": len(labels)})


def target_missing(right: Function) -> Function:
    """Use the probabilities alone, without subtracting 1 at the label."""

    def wrong(logits: np.ndarray, labels: np.ndarray, **kw: Any) -> np.ndarray:
        uniform = right(logits, labels, **kw | {"label_smoothing": 1.0})
        return uniform + (labels >= 0)[:, None] / logits.dtype.type(logits.shape[1] * kw["n_trained"])

    return wrong


def is_grouped(config: ModelConfig) -> bool:
    """Tell if a model has more query heads than key heads."""
    return config.n_heads > config.n_kv_heads


GRADIENTS: tuple[Mistake[Any], ...] = (
    training_mistake("gradient-softmax-term-missing", GRADIENT, OPS + "attention.attention_probs_backward",
        softmax_diagonal,
        "The gradient was only multiplied by the probabilities; also subtract the sum of the product over the keys."),
    training_mistake("gradient-softmax-as-sigmoid", GRADIENT, OPS + "attention.attention_probs_backward",
        softmax_second_twice,
        "The softmax was derived as p (1 - p), element by element; probabilities of a row depend on each other."),
    training_mistake("gradient-scores-not-scaled", GRADIENT, OPS + "attention.attention_scores_backward",
        scores_not_scaled,
        "The gradients of queries and keys were not divided by sqrt(head_dim), as the scores are."),
    training_mistake("gradient-keys-not-summed-over-group", GRADIENT, OPS + "attention.attention_scores_backward",
        keys_of_one_head,
        "A key got the gradient of one query head; it gets the sum over all heads of its group.",
        applies_to=is_grouped),
    training_mistake("gradient-values-not-summed-over-group", GRADIENT, OPS + "attention.attention_context_backward",
        values_of_one_head,
        "A value got the gradient of one query head; it gets the sum over all heads of its group.",
        applies_to=is_grouped),
    training_mistake("gradient-norm-second-term-missing", GRADIENT, OPS + "rms_norm.rms_norm_backward", norm_first_term,
        "The root mean square was treated as a constant; it depends on the row, which gives a second term."),
    training_mistake("gradient-norm-gain-missing", GRADIENT, OPS + "rms_norm.rms_norm_backward", norm_without_gain,
        "The gain of the norm is missing in the gradient; frozen or not, it scales the gradient."),
    training_mistake("gradient-rope-turned-on", GRADIENT, OPS + "rope.rope_backward", turned_on,
        "The gradient was rotated by the angle of the forward pass; rotate it by the negative angle."),
    training_mistake("gradient-rope-missing", GRADIENT, OPS + "rope.rope_backward", not_turned,
        "The gradient of queries and keys was not rotated; rotate it by the negative angle of its position."),
    training_mistake("gradient-silu-second-term-missing", GRADIENT, OPS + "swiglu.swiglu_backward", silu_as_gate,
        "The sigmoid of the gate was treated as a constant; silu' is s (1 + z (1 - s))."),
    training_mistake("gradient-lora-not-scaled", GRADIENT, OPS + "lora.lora_backward", not_scaled,
        "The scale is in the forward pass only; it multiplies the gradients of A, B and the input too."),
    training_mistake("gradient-lora-input-left-out", GRADIENT, OPS + "lora.lora_backward", lora_input_left_out,
        "The gradient of the adapter's input is missing; x goes into both the matrix and the adapter."),
    training_mistake("gradient-frozen-weight-stops-it", GRADIENT, OPS + "lora.LoraMatrix.backward", base_left_out,
        "The frozen matrix blocked the gradient; it is not trained, but passes the gradient on."),
    training_mistake("gradient-graph-cut-between-blocks", GRADIENT, "llorch.model.backward.block_backward",
        gradient_missing,
        "Blocks below got no gradient: the graph was cut, as by recomputation with a frozen input, and their "
        "adapters are never trained."),
    training_mistake("gradient-residual-left-out", GRADIENT, "llorch.model.backward.block_backward", residual_cut,
        "The gradient of the residual stream was lost; it passes every block unchanged."),
    training_mistake("gradient-divided-by-rows", GRADIENT, OPS + "cross_entropy.cross_entropy_backward",
        rows_for_tokens,
        "The gradient was divided by the rows of the document; it is divided by the learned tokens of the step."),
    training_mistake("gradient-target-missing", GRADIENT, OPS + "cross_entropy.cross_entropy_backward", target_missing,
        "The gradient of the logits is the probabilities minus the target; the target was not subtracted."),
)  # fmt: skip
