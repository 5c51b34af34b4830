"""ggml's own shared library, as llama-cpp-python installs it: the witness for block decoding and file checks."""

import ctypes
import importlib.util
from pathlib import Path

import pytest


def load_ggml() -> ctypes.CDLL:
    """Load libggml-base without importing llama_cpp, or skip the test and say why."""
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        pytest.skip("NOT RUN: llama_cpp is not installed (pip install 'llorch[golden]')")
    library = ctypes.CDLL(str(next((Path(found.origin).parent / "lib").glob("*ggml-base.*"))))
    library.ggml_log_set(SILENT, None)
    return library


SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
