"""Stored matrices as C multiplies them: rows of blocks as in a GGUF file, or the packed codes of a quantised folder."""

from llorch.files.packed import Packed
from llorch.files.quant import GGMLType
from llorch.ops.compiled.products import KINDS, RUN, CompiledMatrix, is_available


def compiled_matrix(packed: Packed) -> CompiledMatrix | None:
    """Return a matrix for the C library; None without the library, or for a type that it does not have."""
    if not has_compiled_form(packed) or not is_available():
        return None
    n_out, n_in = packed.shape
    return CompiledMatrix(packed.ggml.name, (n_out, n_in), packed.by_row)


def has_compiled_form(packed: Packed) -> bool:
    """Tell if the C library has functions for the type and the row length of a matrix."""
    kind = packed.ggml_type
    return isinstance(kind, GGMLType) and kind.name in KINDS and packed.shape[-1] % RUN == 0
