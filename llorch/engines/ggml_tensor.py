"""Read ggml tensors from Python: the C struct, a check of its layout, and a copy that honours strides.

llama-cpp-python does not declare `struct ggml_tensor`, and its layout changes between releases. This module declares
it, and `check_layout` builds a small graph in C and raises an error if a field differs from the C accessors.

The module also calls ggml's rounding of activations: the C functions that the CPU backend calls before a product. Their
variant (`HOST_VARIANT`) depends on the processor for which ggml was built; portable C variants are in every build.

Source: llama.cpp `ggml/include/ggml.h`, `ggml/src/ggml-cpu/ggml-cpu.h` (struct ggml_type_traits_cpu) and
`ggml/src/ggml-quants.h`, at the release that llama-cpp-python 0.3.36 carries.
"""

import ctypes
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp._ggml import libggml

from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.ops.rounding import HOST_VARIANT, ActivationKind, VariantName

N_DIMS = 4
N_SOURCES = 10
OP_PARAM_BYTES = 64
NAME_BYTES = 64

_F32, _F16 = 0, 1  # GGML_TYPE_F32, GGML_TYPE_F16; numbers that files hold, so they never change
DTYPES = {b"f32": np.dtype(np.float32), b"f16": np.dtype(np.float16), b"i32": np.dtype(np.int32)}


class GgmlTensor(ctypes.Structure):
    """Node of a ggml graph: type, shape, strides, operation, sources and name."""


GgmlTensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * N_DIMS),  # elements per axis, fastest first
    ("nb", ctypes.c_size_t * N_DIMS),  # stride per axis in bytes
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * (OP_PARAM_BYTES // 4)),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(GgmlTensor) * N_SOURCES),
    ("view_src", ctypes.POINTER(GgmlTensor)),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * NAME_BYTES),
    ("extra", ctypes.c_void_p),
    ("padding", ctypes.c_char * 8),
]


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


_POINTER = ctypes.c_void_p
_SIGNATURES = {
    "ggml_backend_tensor_get": (None, [_POINTER, _POINTER, ctypes.c_size_t, ctypes.c_size_t]),
    "ggml_nbytes": (ctypes.c_size_t, [_POINTER]),
    "ggml_nelements": (ctypes.c_int64, [_POINTER]),
    "ggml_op_desc": (ctypes.c_char_p, [_POINTER]),
    "ggml_get_name": (ctypes.c_char_p, [_POINTER]),
    "ggml_get_data": (_POINTER, [_POINTER]),
    "ggml_type_name": (ctypes.c_char_p, [ctypes.c_int]),
    "ggml_op_name": (ctypes.c_char_p, [ctypes.c_int]),
    "ggml_version": (ctypes.c_char_p, []),
    "ggml_commit": (ctypes.c_char_p, []),
    "ggml_init": (_POINTER, [_InitParams]),
    "ggml_free": (None, [_POINTER]),
    "ggml_new_tensor_3d": (_POINTER, [_POINTER, ctypes.c_int, *[ctypes.c_int64] * 3]),
    "ggml_set_name": (_POINTER, [_POINTER, ctypes.c_char_p]),
    "ggml_permute": (_POINTER, [_POINTER, _POINTER, *[ctypes.c_int] * 4]),
    "ggml_soft_max_ext": (_POINTER, [_POINTER, _POINTER, _POINTER, ctypes.c_float, ctypes.c_float]),
}
for _name, (_result, _arguments) in _SIGNATURES.items():
    _symbol = getattr(libggml, _name)
    _symbol.restype, _symbol.argtypes = _result, _arguments


def node(address: int) -> GgmlTensor:
    """Return the tensor at a C address."""
    return GgmlTensor.from_address(address)


def op_name(tensor: GgmlTensor) -> str:
    """Return the operation that computes the tensor; for unary and gated operations the function, like SILU."""
    return libggml.ggml_op_desc(ctypes.byref(tensor)).decode()


def source_names(tensor: GgmlTensor) -> tuple[str, ...]:
    """List the names of a tensor's sources; after a source that has only a number (`node_17`), those of its sources."""
    names: list[str] = []
    for source in (source.contents for source in tensor.src if source):
        name = source.name.decode()
        names += [name, *(source_names(source) if name.startswith("node_") else ())]
    return tuple(names)


def float_params(tensor: GgmlTensor) -> np.ndarray:
    """Read the parameters of the tensor's operation as float32; which ones are floats depends on the operation."""
    return np.frombuffer(bytes(tensor.op_params), np.float32)


def copy_tensor(tensor: GgmlTensor) -> np.ndarray:
    """Copy a computed tensor or view from its backend to a C-contiguous array with four axes, slowest axis first."""
    type_name = libggml.ggml_type_name(tensor.type)
    if type_name not in DTYPES:
        name = tensor.name.decode()
        raise TypeError(f"ggml tensor {name}: expected f32, f16 or i32, got {type_name.decode()}")
    span = np.empty(libggml.ggml_nbytes(ctypes.byref(tensor)), np.uint8)  # first to last element of a view
    libggml.ggml_backend_tensor_get(ctypes.byref(tensor), span.ctypes.data, 0, span.nbytes)
    shape, strides = tuple(reversed(tensor.ne)), tuple(reversed(tensor.nb))
    return np.ndarray(shape, DTYPES[type_name], span, strides=strides).copy()


class _Traits(ctypes.Structure):
    """First fields of `struct ggml_type_traits`."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block_size", ctypes.c_int64),
        ("block_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, _POINTER, _POINTER, ctypes.c_int64)),
    )


libggml.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
libggml.ggml_get_type_traits.argtypes = [ctypes.c_int]


def decode_by_ggml(raw: np.ndarray, ggml_type: int, n_elements: int) -> np.ndarray:
    """Decode whole blocks with ggml's C function for their type; F32 has no such function."""
    raw, decoded = np.ascontiguousarray(raw), np.empty(n_elements, np.float32)
    libggml.ggml_get_type_traits(ggml_type).contents.to_float(raw.ctypes.data, decoded.ctypes.data, n_elements)
    return decoded


def decoded_hash(raw: np.ndarray, ggml_type: int, n_elements: int) -> str:
    """Hash the decoded tensor with SHA-256, because sending large tensors to the parent process is slow."""
    return hashlib.sha256(decode_by_ggml(raw, ggml_type, n_elements).data).hexdigest()


def check_layout() -> None:
    """Compare every field that llorch reads with the C accessors on a small graph; raise RuntimeError otherwise."""
    with _probe_graph() as (scores, view, mask, softmax):
        checks = {
            "type": (view.type, mask.type) == (_F32, _F16),
            "ne": tuple(view.ne) == (5, 7, 3, 1) and libggml.ggml_nelements(ctypes.byref(view)) == 105,
            "nb": tuple(view.nb) == (4, 60, 20, 420) and libggml.ggml_nbytes(ctypes.byref(view)) == 420,
            "op": softmax.op == _op_number(b"SOFT_MAX") and op_name(softmax) == "SOFT_MAX",
            "op_params": tuple(float_params(softmax)[:2]) == (0.375, 0.0),
            "src": [_address(softmax.src[i]) for i in range(3)] == [_pointer_to(scores), _pointer_to(mask), 0],
            "view_src": _address(view.view_src) == _pointer_to(scores) and view.view_offs == 0,
            "data": scores.data == libggml.ggml_get_data(ctypes.byref(scores)) is not None,
            "name": softmax.name == libggml.ggml_get_name(ctypes.byref(softmax)) == b"probe",
        }
    wrong = [field for field, agrees in checks.items() if not agrees]
    if wrong:
        raise RuntimeError(
            f"llama.cpp: struct ggml_tensor of ggml {libggml.ggml_version().decode()} has another layout than "
            f"expected, at {', '.join(wrong)}; install the right release: pip install 'llorch[golden]'"
        )


@contextmanager
def _probe_graph() -> Iterator[tuple[GgmlTensor, GgmlTensor, GgmlTensor, GgmlTensor]]:
    """Yield tensors with known fields for `check_layout`: scores, a permuted view, a mask and their softmax."""
    context = libggml.ggml_init(_InitParams(1 << 16, None, False))
    try:
        scores = libggml.ggml_new_tensor_3d(context, _F32, 5, 3, 7)
        view = libggml.ggml_permute(context, scores, 0, 2, 1, 3)
        mask = libggml.ggml_new_tensor_3d(context, _F16, 5, 3, 1)
        softmax = libggml.ggml_soft_max_ext(context, scores, mask, 0.375, 0.0)
        libggml.ggml_set_name(softmax, b"probe")
        yield node(scores), node(view), node(mask), node(softmax)
    finally:
        libggml.ggml_free(context)


def _op_number(name: bytes) -> int:
    """Return the number of an operation; with a wrong layout, a lookup by number could read outside C arrays."""
    return next(number for number in range(1 << 16) if libggml.ggml_op_name(number) == name)


def _address(pointer: Any) -> int:
    return _pointer_to(pointer.contents) if pointer else 0


def _pointer_to(tensor: GgmlTensor) -> int:
    return ctypes.addressof(tensor)


# Portable C function by kind of activation; other kinds are floats, which have no variants.
_PORTABLE = {"Q8_0": "quantize_row_q8_0_ref", "Q8_1": "quantize_row_q8_1_ref", "Q8_K": "quantize_row_q8_K_ref"}
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
    """List the variants of a rounding in this build of ggml: the processor's, and portable C."""
    return tuple(dict.fromkeys((HOST_VARIANT, "generic"))) if kind in _PORTABLE else (HOST_VARIANT,)


def quantize(rows: np.ndarray, kind: ActivationKind, variant: VariantName) -> np.ndarray:
    """Round float32 rows to a kind other than F32 with ggml's C function; return the blocks that ggml multiplies."""
    rows = np.ascontiguousarray(rows, np.float32)
    block_size, block_bytes = BLOCK_SIZES[GGMLType[kind]]
    raw = np.zeros((rows.size // block_size, block_bytes), np.uint8)
    _rounding_function(kind, variant)(rows.ctypes.data, raw.ctypes.data, rows.size)
    return raw


def _rounding_function(kind: ActivationKind, variant: VariantName) -> Callable[[int, int, int], None]:
    """Return ggml's C function that rounds a row to blocks: the portable function, or this CPU's from a private table.

    The table's layout is checked with Q4_0, whose entries have known values.
    """
    if variant != HOST_VARIANT:
        return ctypes.cast(getattr(libggml, _PORTABLE[kind]), _QUANTIZER)
    folder = Path(llama_cpp.__file__).parent / "lib"
    library = ctypes.CDLL(str(next(folder.glob("*ggml-cpu.*"))))
    library.ggml_get_type_traits_cpu.restype = ctypes.POINTER(_CPUTraits)
    q4_0 = library.ggml_get_type_traits_cpu(_Q4_0).contents
    address = ctypes.cast(library.quantize_row_q4_0, ctypes.c_void_p).value
    if ctypes.cast(q4_0.from_float, ctypes.c_void_p).value != address or q4_0.vec_dot_type != _Q8_0:
        raise RuntimeError(
            "llama.cpp: struct ggml_type_traits_cpu has an unexpected layout; run pip install 'llorch[golden]'"
        )
    return library.ggml_get_type_traits_cpu(int(GGMLType[kind])).contents.from_float
