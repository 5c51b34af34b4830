"""Check of ggml's kernels at first use: their product of a few rows of a matrix, compared with llorch's own form."""

import numpy as np

from llorch.files.matrix import Matrix
from llorch.files.packed import Packed
from llorch.files.quant import ACTIVATION_TYPE, GGMLType
from llorch.ops.compiled.ggml import ggml_kernels, require_product
from llorch.ops.rounding import round_activations

_ROWS = 16  # of the matrix
_checked: set[GGMLType] = set()  # types whose kernel was right in this process


def require_kernel(packed: Packed) -> None:
    """Compare the products of the first rows of a matrix, once for each type.

    NoKernels if ggml's product differs or cannot be used; FormatError NonFinite for a weight that is NaN or infinite.
    """
    kernels, kind = ggml_kernels(), packed.ggml
    if kind in _checked:
        return
    rows = packed.picked(slice(0, _ROWS))
    x = np.random.default_rng(0).normal(size=(3, packed.shape[1])).astype(np.float32)
    magnitudes = np.abs(round_activations(x, ACTIVATION_TYPE[kind])) @ np.abs(rows.decode()).T
    actual = kernels.matrix(kind, rows.by_row, packed.shape[1]).multiply(x)
    require_product(actual, Matrix(rows, round_inputs=True).forward(x), magnitudes, kind.name)
    _checked.add(kind)
