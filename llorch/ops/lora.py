"""LoRA: a trained low-rank product added to a frozen matrix.

    y = W x + s B A x            A (r, in), B (out, r), s = scaling
    dL/dB = s g (A x)^T          g = dL/dy; summed over the rows of x and g
    dL/dA = s (B^T g) x^T
    dL/dx = W^T g + s A^T B^T g

The frozen W gets no gradient. Training starts with B = 0, so its first dL/dA is exactly 0. Dropout acts only on the x
of the adapter: x' = mask * x, dL/dx = mask * dL/dx'. For an embedding x is one-hot: A x is a column of A.

Source: arXiv:2106.09685; peft/tuners/lora/layer.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from llorch.ops.dora import dora, dora_backward, row_lengths
from llorch.ops.embedding import embedding, embedding_backward
from llorch.ops.linear import linear, linear_backward, product
from llorch.ops.numerics import QuantMethod
from llorch.ops.precision import widen

Trained = dict[str, np.ndarray]  # lora_A, lora_B, with DoRA magnitude -> gradient


def lora_delta(
    x: Float[np.ndarray, "seq in"],
    lora_A: Float[np.ndarray, "r in"],
    lora_B: Float[np.ndarray, "out r"],
    *,
    scaling: float,
) -> Float[np.ndarray, "seq out"]:
    """Compute the adapter's addition to the frozen projection.

    Args:
        x: Activations, after dropout if there is any.
        lora_A: Projection down to rank r.
        lora_B: Projection up to the output.
        scaling: Factor of the product.

    Returns:
        The addition, in the dtype of `x`.
    """
    wide_x, wide_A, wide_B = widen(x, lora_A, lora_B)
    return (wide_x @ wide_A.T @ wide_B.T * scaling).astype(x.dtype, copy=False)


def lora_backward(
    grad: Float[np.ndarray, "seq out"],
    x: Float[np.ndarray, "seq in"],
    lora_A: Float[np.ndarray, "r in"],
    lora_B: Float[np.ndarray, "out r"],
    *,
    scaling: float,
) -> tuple[Float[np.ndarray, "seq in"], Float[np.ndarray, "r in"], Float[np.ndarray, "out r"]]:
    """Compute the gradients by the input and by both matrices.

    Args:
        grad: Gradient by the addition.
        x: Activations, after dropout if there was any.
        lora_A: Projection down to rank r.
        lora_B: Projection up to the output.
        scaling: Factor of the product.

    Returns:
        Gradients by `x`, `lora_A` and `lora_B`, in the dtype of `grad`.
    """
    wide_grad, wide_x, wide_A, wide_B = widen(grad, x, lora_A, lora_B)
    d_up = wide_grad * scaling  # (seq, out)
    d_down = d_up @ wide_B  # (seq, r)
    grads = (d_down @ wide_A, d_down.T @ wide_x, d_up.T @ (wide_x @ wide_A.T))
    d_x, d_A, d_B = (array.astype(grad.dtype, copy=False) for array in grads)
    return d_x, d_A, d_B


def embedding_lora_delta(
    ids: Int[np.ndarray, " seq"],
    lora_A: Float[np.ndarray, "r vocab"],
    lora_B: Float[np.ndarray, "hidden r"],
    *,
    scaling: float,
) -> Float[np.ndarray, "seq hidden"]:
    """Compute the addition of an embedding's adapter to the looked-up rows.

    Args:
        ids: Token ids.
        lora_A: One column per token.
        lora_B: Projection up from rank r.
        scaling: Factor of the product.

    Returns:
        The addition, in the dtype of the adapter.
    """
    return linear(embedding(ids, lora_A.T), lora_B) * scaling


def embedding_lora_backward(
    grad: Float[np.ndarray, "seq hidden"],
    ids: Int[np.ndarray, " seq"],
    lora_A: Float[np.ndarray, "r vocab"],
    lora_B: Float[np.ndarray, "hidden r"],
    *,
    scaling: float,
) -> tuple[Float[np.ndarray, "r vocab"], Float[np.ndarray, "hidden r"]]:
    """Compute the gradients by both matrices of an embedding's adapter.

    Args:
        grad: Gradient by the addition.
        ids: Token ids.
        lora_A: One column per token.
        lora_B: Projection up from rank r.
        scaling: Factor of the product.

    Returns:
        Gradients by `lora_A` and `lora_B`, in the dtype of `grad`; columns of tokens that do not occur are 0.
    """
    d_up = grad * scaling  # (seq, hidden)
    d_A = embedding_backward(linear_backward(d_up, lora_B), ids, vocab_size=lora_A.shape[1]).T
    return d_A, linear(d_up.T, embedding(ids, lora_A.T).T)


@dataclass(frozen=True)
class Lora:
    """Adapter of one matrix, in the dtype of the run; for an embedding `in` is the vocabulary."""

    lora_A: Float[np.ndarray, "r in"]
    lora_B: Float[np.ndarray, "out r"]
    scaling: float  # factor of the product
    magnitude: Float[np.ndarray, " out"] | None = None  # trained row norms of DoRA
    mask: Float[np.ndarray, "seq in"] | None = None  # 0 or 1 / (1 - p) in training; an embedding has none
    name: str = ""  # of a stacked matrix (all experts, fused rows) whose adapter has these arrays as slices; else empty
    pad: Callable[[Trained], Trained] | None = None  # zero-pads gradients of the slice to the adapter's shapes

    def addition(self) -> Float[np.ndarray, "out in"]:
        """Compute the addition to the matrix itself, scaling * B A."""
        return linear(self.lora_B, self.lora_A.T) * self.scaling

    def apply_dropout(self, x: Float[np.ndarray, "seq in"]) -> Float[np.ndarray, "seq in"]:
        """Apply dropout to an input, or to its gradient."""
        return x if self.mask is None else (x * self.mask).astype(x.dtype, copy=False)


class LoraMatrix:
    """Frozen matrix with a LoRA adapter of its products, of its embedding rows, or of both; a `QuantMethod`.

    Tied embeddings can have both: one base with two adapters, for the embedding and for the output matrix.
    """

    def __init__(
        self, base: np.ndarray | QuantMethod, lora: Lora | None = None, *, embedding_lora: Lora | None = None
    ) -> None:
        """Add adapters to an array in the dtype of the run, or to a packed matrix."""
        self.base = base
        self.lora = lora
        self.embedding_lora = embedding_lora
        self.shape = base.shape
        self.n_bytes = base.nbytes if isinstance(base, np.ndarray) else base.n_bytes
        self.activations = "F32" if isinstance(base, np.ndarray) else base.activations

    def forward(self, x: Float[np.ndarray, "seq in"]) -> Float[np.ndarray, "seq out"]:
        """Sum the base product and the adapter's; small products stay in float64, see `product`."""
        y = product(x, self.base)
        return y if self.lora is None else y + self.added(x, y)

    def added(self, x: Float[np.ndarray, "seq in"], y: Float[np.ndarray, "seq out"]) -> Float[np.ndarray, "seq out"]:
        """Compute the adapter's addition to `y`, the product of the frozen matrix and `x`."""
        lora = self.lora
        assert lora is not None
        dropped_x = lora.apply_dropout(x)
        delta = lora_delta(dropped_x, lora.lora_A, lora.lora_B, scaling=lora.scaling)
        if lora.magnitude is None:
            return delta
        base_y = y if lora.mask is None else product(dropped_x, self.base)
        return dora(base_y, delta, lora.magnitude, self._lengths)

    def backward(
        self, grad: Float[np.ndarray, "seq out"], x: Float[np.ndarray, "seq in"]
    ) -> tuple[Float[np.ndarray, "seq in"], Trained]:
        """Compute the gradients of `forward` by its input and by the trained arrays."""
        d_x, lora = linear_backward(grad, self.base), self.lora
        if lora is None:
            return d_x, {}
        dropped_x, d_delta, trained = lora.apply_dropout(x), grad, {}
        if lora.magnitude is not None:
            delta = lora_delta(dropped_x, lora.lora_A, lora.lora_B, scaling=lora.scaling)
            base_y = product(dropped_x, self.base)
            d_base, d_delta, d_magnitude = dora_backward(grad, base_y, delta, lora.magnitude, self._lengths)
            d_x += lora.apply_dropout(linear_backward(d_base, self.base))
            trained = {"magnitude": d_magnitude}
        d_dropped_x, d_A, d_B = lora_backward(d_delta, dropped_x, lora.lora_A, lora.lora_B, scaling=lora.scaling)
        trained = {"lora_A": d_A, "lora_B": d_B} | trained
        return d_x + lora.apply_dropout(d_dropped_x), trained if lora.pad is None else lora.pad(trained)

    def rows(self, ids: Int[np.ndarray, " seq"]) -> Float[np.ndarray, "seq in"]:
        """Look up embedding rows, and add the addition of their adapter."""
        base_rows, lora = embedding(ids, self.base), self.embedding_lora
        if lora is None:
            return base_rows
        delta = embedding_lora_delta(ids, lora.lora_A, lora.lora_B, scaling=lora.scaling)
        if lora.magnitude is not None:
            delta = dora(base_rows, delta, lora.magnitude, self._embedding_lengths)
        return base_rows + delta

    def rows_backward(self, grad: Float[np.ndarray, "seq in"], ids: Int[np.ndarray, " seq"]) -> Trained:
        """Compute the gradients of `rows` by the trained arrays."""
        lora, trained = self.embedding_lora, {}
        if lora is None:
            return trained
        if lora.magnitude is not None:
            delta = embedding_lora_delta(ids, lora.lora_A, lora.lora_B, scaling=lora.scaling)
            base_rows = embedding(ids, self.base)
            _, grad, d_magnitude = dora_backward(grad, base_rows, delta, lora.magnitude, self._embedding_lengths)
            trained = {"magnitude": d_magnitude}
        d_A, d_B = embedding_lora_backward(grad, ids, lora.lora_A, lora.lora_B, scaling=lora.scaling)
        return {"lora_A": d_A, "lora_B": d_B} | trained

    def dequantize(self) -> Float[np.ndarray, "out in"]:
        """Merge the adapter of the products into the matrix; dropout is ignored."""
        weight, lora = decoded(self.base), self.lora
        if lora is None:
            return weight
        merged = weight + lora.addition()
        return merged if lora.magnitude is None else merged * (lora.magnitude / self._lengths)[:, None]

    def table(self) -> Float[np.ndarray, "vocab hidden"]:
        """Merge the adapter of the rows into the embedding table."""
        return self.rows(np.arange(self.shape[0]))

    @cached_property
    def _lengths(self) -> np.ndarray:
        assert self.lora is not None
        return row_lengths(decoded(self.base), self.lora.addition())

    @cached_property
    def _embedding_lengths(self) -> np.ndarray:
        assert self.embedding_lora is not None
        return row_lengths(decoded(self.base).T, self.embedding_lora.addition())


def decoded(weight: np.ndarray | QuantMethod) -> np.ndarray:
    """Return a matrix as an array, decoded if it is packed."""
    return weight if isinstance(weight, np.ndarray) else weight.dequantize()
