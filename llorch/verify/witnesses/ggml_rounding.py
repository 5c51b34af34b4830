"""ggml's own rounding of activations: the C functions that its CPU backend calls before it multiplies.

Which of them runs depends on the processor that ggml was built for; the plain C versions are in every build.

Source: llama.cpp `ggml/src/ggml-cpu/ggml-cpu.h` (struct ggml_type_traits_cpu) and `ggml/src/ggml-quants.h`, at the
release that llama-cpp-python 0.3.36 carries.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import numpy as np
from llama_cpp._ggml import libggml

from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.ops.rounding import HOST_VARIANT, ActivationKind, VariantName

_PLAIN = {"Q8_0": "quantize_row_q8_0_ref", "Q8_1": "quantize_row_q8_1_ref", "Q8_K": "quantize_row_q8_K_ref"}
_Q4_0, _Q8_0 = 2, 8  # GGML_TYPE_Q4_0, GGML_TYPE_Q8_0
_QUANTIZER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class _CPUTraits(ctypes.Structure):
    _fields_ = [
        ("from_float", _QUANTIZER),
        ("vec_dot", ctypes.c_void_p),
        ("vec_dot_type", ctypes.c_int),
        ("n_rows", ctypes.c_int64),
    ]


def variants(kind: ActivationKind) -> tuple[VariantName, ...]:
    """The variants of a rounding that this build of ggml can show: that of its processor, and plain C."""
    return tuple(dict.fromkeys((HOST_VARIANT, "generic"))) if kind in _PLAIN else (HOST_VARIANT,)


def quantize(rows: np.ndarray, kind: ActivationKind, variant: VariantName) -> np.ndarray:
    """Round float32 rows with ggml's own C function for a kind other than F32: the bytes that ggml multiplies with."""
    rows = np.ascontiguousarray(rows, np.float32)
    block_size, block_bytes = BLOCK_SIZES[GGMLType[kind]]
    raw = np.zeros((rows.size // block_size, block_bytes), np.uint8)
    _function(kind, variant)(rows.ctypes.data, raw.ctypes.data, rows.size)
    return raw


def _function(kind: ActivationKind, variant: VariantName) -> Callable[[int, int, int], None]:
    if variant != HOST_VARIANT:
        return ctypes.cast(getattr(libggml, _PLAIN[kind]), _QUANTIZER)
    folder = Path(llama_cpp.__file__).parent / "lib"
    library = ctypes.CDLL(str(next(folder.glob("*ggml-cpu.*"))))
    library.ggml_get_type_traits_cpu.restype = ctypes.POINTER(_CPUTraits)
    q4_0 = library.ggml_get_type_traits_cpu(_Q4_0).contents
    address = ctypes.cast(library.quantize_row_q4_0, ctypes.c_void_p).value
    if ctypes.cast(q4_0.from_float, ctypes.c_void_p).value != address or q4_0.vec_dot_type != _Q8_0:
        raise RuntimeError("llama.cpp: struct ggml_type_traits_cpu has another layout than the one known here")
    return library.ggml_get_type_traits_cpu(int(GGMLType[kind])).contents.from_float
