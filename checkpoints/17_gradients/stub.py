"""Lesson 17: gradients. The chain rule by hand, one small function for every op of the forward pass.

Write them in any order. Each is checked alone: llorch learn check 17
`grad` is always the gradient of the loss by the result of the op, with the same shape. Weights are frozen.
"""

import numpy as np


def cross_entropy_backward(
    logits: np.ndarray, labels: np.ndarray, label_smoothing: float, n_trained: int
) -> np.ndarray:
    """Return the gradient of the mean loss by the logits.

    Args:
        logits: (seq, vocab), float32.
        labels: Label of every row, already shifted, (seq,); -100: the row does not count.
        label_smoothing: e, the share of the target that is spread over the whole vocabulary.
        n_trained: Learned tokens of the whole optimizer step, by which the loss is divided.

    Returns:
        (seq, vocab), float32; 0 in rows that do not count.
    """
    raise NotImplementedError


def lora_backward(
    grad: np.ndarray, x: np.ndarray, weight: np.ndarray, lora_A: np.ndarray, lora_B: np.ndarray, scaling: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Go back through y = W x + s B A x.

    Args:
        grad: (seq, out), float32.
        x: Input of the op, (seq, in).
        weight: The frozen matrix, (out, in).
        lora_A: (r, in).
        lora_B: (out, r).
        scaling: s.

    Returns:
        Gradients by x (seq, in), by A (r, in) and by B (out, r).
    """
    raise NotImplementedError


def swiglu_backward(grad: np.ndarray, gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Go back through silu(gate) * up.

    Args:
        grad: (seq, inter), float32; `gate` and `up` have the same shape.
        gate: Input of silu.
        up: The other factor.

    Returns:
        Gradients by gate and by up.
    """
    raise NotImplementedError


def rms_norm_backward(grad: np.ndarray, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Go back through x / sqrt(mean(x * x) + eps) * weight, row by row.

    Args:
        grad: (..., width), float32.
        x: Input of the op, the same shape.
        weight: The frozen gain, (width,).
        eps: As in lesson 01.

    Returns:
        Gradient by x, the same shape.
    """
    raise NotImplementedError


def attention_context_backward(grad: np.ndarray, probs: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Go back through probs @ v, heads joined.

    Args:
        grad: (seq, heads * head_dim), float32: heads one after the other.
        probs: (heads, seq, ctx).
        v: (kv_heads, ctx, head_dim); query head h reads value head h // group, group = heads / kv_heads.

    Returns:
        Gradients by probs and by v, each in the shape of its array.
    """
    raise NotImplementedError


def attention_probs_backward(grad: np.ndarray, probs: np.ndarray) -> np.ndarray:
    """Go back through the softmax over the last axis.

    Args:
        grad: (heads, seq, ctx), float32.
        probs: Result of the softmax, the same shape; 0 if a key is masked.

    Returns:
        Gradient by the scores, the same shape.
    """
    raise NotImplementedError


def attention_scores_backward(grad: np.ndarray, q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Go back through q k^T / sqrt(head_dim).

    Args:
        grad: (heads, seq, ctx), float32; 0 where a key is masked.
        q: (seq, heads, head_dim).
        k: (kv_heads, ctx, head_dim); query head h reads key head h // group.

    Returns:
        Gradients by q and by k, each in the shape of its array.
    """
    raise NotImplementedError


def rope_backward(grad: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Go back through the rotation of lesson 01b.

    Args:
        grad: (seq, heads, head_dim), float32.
        cos: Cosine of every position and pair, (seq, half), float64.
        sin: Sine of every position and pair, (seq, half), float64.

    Returns:
        Gradient by the input of the rotation, shape and dtype of `grad`.
    """
    raise NotImplementedError


def residual_backward(grad: np.ndarray, through: np.ndarray) -> np.ndarray:
    """Go back through a block, x + f(x).

    Args:
        grad: Gradient by the output of the block, (seq, hidden), float32.
        through: Gradient that came back through f, (seq, hidden).

    Returns:
        Gradient by x, (seq, hidden).
    """
    raise NotImplementedError
