"""Which arithmetic a forward pass uses, and what a weight matrix must offer that is more than an array.

`exact` multiplies decoded weights with float32 (or float64) activations: what the weights mean.
`ggml` rounds activations first, as the CPU backend of llama.cpp does for every weight type but F32, and keeps keys
and values in float16 where that is asked for: what llama.cpp computes from these weights.
`scheme` rounds activations, and keys and values, as the settings of a quantised Hugging Face folder say: what an engine
with kernels for that scheme computes. A folder whose settings quantise weights alone computes the same as `exact`.

Source: llama.cpp ggml/src/ggml-cpu/ggml-cpu.c (`ggml_compute_forward_mul_mat`, `vec_dot_type`); for schemes see
`llorch.ops.scheme_rounding`.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

DtypeName = Literal["float64", "float32", "bfloat16", "float16"]  # of a run on an engine that computes in one dtype


@dataclass(frozen=True)
class Numerics:
    """The arithmetic of a run.

    With an `f16` cache queries and probabilities are rounded to float16 too: keys and values are the weights of their
    products.
    """

    name: Literal["exact", "ggml", "scheme"] = "exact"
    kv_cache: Literal["f32", "f16"] = "f32"

    @property
    def rounds_activations(self) -> bool:
        """True if a matrix rounds what it is multiplied with."""
        return self.name != "exact"

    def cache_dtype(self, dtype: type[np.floating]) -> type[np.floating]:
        """Return the dtype of keys and values in a run of this dtype."""
        return np.float16 if self.kv_cache == "f16" else dtype

    def __str__(self) -> str:
        """Format the numerics as the command line does."""
        return self.name if self.kv_cache == "f32" else f"{self.name} with a {self.kv_cache} cache"


EXACT = Numerics("exact")
GGML = Numerics("ggml")
SCHEME = Numerics("scheme")


@runtime_checkable
class QuantMethod(Protocol):
    """A matrix (out, in) that multiplies itself: stored in a packed type, or with rounded activations."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, (out, in)."""
        ...

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes where it is stored."""
        ...

    @property
    def activations(self) -> str:
        """The type that its inputs are rounded to; F32 when they are not."""
        ...

    def forward(self, x: Float[np.ndarray, "seq in"]) -> Float[np.ndarray, "seq out"]:
        """Multiply every row of `x`; the result is new, and has the dtype of `x` or is yet to be rounded to it."""
        ...

    def dequantize(self) -> Float[np.ndarray, "out in"]:
        """Return the whole matrix as float32."""
        ...

    def rows(self, ids: Int[np.ndarray, " seq"]) -> Float[np.ndarray, "seq in"]:
        """Return some rows, for an embedding."""
        ...
