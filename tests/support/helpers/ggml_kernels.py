"""Tests of ggml's kernels: they run wherever llama-cpp-python and a compiler are, so that a wrong kernel fails them."""

from importlib.util import find_spec

import pytest

from llorch.ops.compiled.library import find_compiler

_REASON = "llama_cpp is not installed" if find_spec("llama_cpp") is None else "no C compiler"
HAS_GGML = find_spec("llama_cpp") is not None and find_compiler() is not None
NEEDS_GGML = pytest.mark.skipif(not HAS_GGML, reason=f"NOT RUN: {_REASON}")
