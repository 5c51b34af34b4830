"""Arithmetic of a forward pass, and the interface of a weight matrix that is not a plain array.

`exact` multiplies decoded weights with float32 (or float64) activations.
`ggml` reproduces llama.cpp's CPU backend: it rounds activations for every weight type but F32, and can keep keys and
values in float16.
`scheme` rounds activations, keys and values as the settings of a quantised Hugging Face folder say, like an engine
with kernels for that scheme. If a folder quantises weights only, `scheme` equals `exact`.

Source: llama.cpp ggml/src/ggml-cpu/ggml-cpu.c (`ggml_compute_forward_mul_mat`, `vec_dot_type`); for schemes see
`llorch.ops.scheme_rounding`.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

DtypeName = Literal["float64", "float32", "bfloat16", "float16"]  # dtype of a run
ProductKernels = Literal["own", "ggml"]  # whose functions multiply stored matrices


@dataclass(frozen=True)
class Numerics:
    """The arithmetic of a run.

    With an `f16` cache, queries and probabilities are rounded to float16 too, because ggml rounds the other operand of
    a product to the type of the cached operand.

    With `kernels` of ggml, ggml's own functions multiply the stored matrices of a float32 run. The numbers are those of
    llorch's own form of ggml numerics, up to the order of sums.
    """

    name: Literal["exact", "ggml", "scheme"] = "exact"
    kv_cache: Literal["f32", "f16"] = "f32"
    kernels: ProductKernels = "own"

    def __post_init__(self) -> None:
        if self.kernels == "ggml" and self.name != "ggml":
            raise ValueError(f"ggml's kernels round activations as ggml does: expected ggml numerics, got {self.name}")

    @property
    def rounds_activations(self) -> bool:
        """True if matrix products round their activations."""
        return self.name != "exact"

    def cache_dtype(self, dtype: type[np.floating]) -> type[np.floating]:
        """Return the dtype of keys and values in a run of this dtype."""
        return np.float16 if self.kv_cache == "f16" else dtype

    def __str__(self) -> str:
        """Format the numerics as the command line does."""
        cache = "" if self.kv_cache == "f32" else f" with a {self.kv_cache} cache"
        return self.name + cache + (" by ggml's kernels" if self.kernels == "ggml" else "")


EXACT = Numerics("exact")
GGML = Numerics("ggml")
GGML_KERNELS = Numerics("ggml", kernels="ggml")
SCHEME = Numerics("scheme")


@runtime_checkable
class QuantMethod(Protocol):
    """Weight matrix (out, in) with its own product: stored in a packed type, or with rounded activations."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, (out, in)."""
        ...

    @property
    def n_bytes(self) -> int:
        """Size of the stored matrix in bytes."""
        ...

    @property
    def activations(self) -> str:
        """Type that inputs are rounded to; F32 if they are not rounded."""
        ...

    def forward(self, x: Float[np.ndarray, "seq in"]) -> Float[np.ndarray, "seq out"]:
        """Multiply every row of `x` into a new array; the caller rounds it to the dtype of `x`."""
        ...

    def dequantize(self) -> Float[np.ndarray, "out in"]:
        """Return the whole matrix as float32."""
        ...

    def rows(self, ids: Int[np.ndarray, " seq"]) -> Float[np.ndarray, "seq in"]:
        """Return the rows of the given token ids, for an embedding."""
        ...
