"""ggml's own shared libraries, as llama-cpp-python installs them: the reference for blocks, roundings, file checks."""

import ctypes
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

Quantizer = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class CPUTraits(ctypes.Structure):
    """`struct ggml_type_traits_cpu`: what the CPU backend does with a type."""

    _fields_ = (
        ("from_float", Quantizer),
        ("vec_dot", ctypes.c_void_p),
        ("vec_dot_type", ctypes.c_int),
        ("n_rows", ctypes.c_int64),
    )


def load_ggml() -> ctypes.CDLL:
    """Load libggml-base without importing llama_cpp, or skip the test and say why."""
    library = _load("ggml-base")
    library.ggml_log_set(SILENT, None)
    return library


def cpu_traits_of(kind: int) -> CPUTraits:
    """Ask libggml-cpu what it does with a type, once its struct has proved to be the one known here."""
    load_ggml()  # which the other one is linked against
    library = _load("ggml-cpu")
    library.ggml_get_type_traits_cpu.restype = ctypes.POINTER(CPUTraits)
    q4_0 = library.ggml_get_type_traits_cpu(2).contents
    address = ctypes.cast(library.quantize_row_q4_0, ctypes.c_void_p).value
    assert ctypes.cast(q4_0.from_float, ctypes.c_void_p).value == address, "ggml_type_traits_cpu has another layout"
    assert (q4_0.vec_dot_type, q4_0.n_rows) in {(8, 1), (8, 2)}, "ggml_type_traits_cpu has another layout"
    return library.ggml_get_type_traits_cpu(kind).contents


def from_float_of_cpu(kind: int) -> Callable[[int, int, int], None]:
    """The function with which the CPU backend rounds activations: source, target, number of elements."""
    return cpu_traits_of(kind).from_float


def _load(name: str) -> ctypes.CDLL:
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        pytest.skip("NOT RUN: llama_cpp is not installed (pip install 'llorch[golden]')")
    return ctypes.CDLL(str(next((Path(found.origin).parent / "lib").glob(f"*{name}.*"))))


SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
