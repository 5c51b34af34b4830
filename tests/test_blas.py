"""Which kernels OpenBLAS has is decided once per process, so each case runs in one of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llorch.blas import needs_help

FLAGS = "fpu sse2 avx2 fma avx512f avx512cd avx512dq avx512bw avx512vl"
CORE = """
import ctypes
path = next(line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line)
name = ctypes.CDLL(path).scipy_openblas_get_corename64_
name.restype = ctypes.c_char_p
print(name().decode())
"""


def cpuinfo(vendor: str = "AuthenticAMD", flags: str = FLAGS) -> str:
    core = f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: some: name\nflags\t\t: {flags}\n"
    return f"{core}\n{core}"


def run(code: str, **environment: str) -> str:
    clean = {key: value for key, value in os.environ.items() if key != "OPENBLAS_CORETYPE"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_an_amd_processor_with_all_of_avx512_needs_help():
    assert needs_help(cpuinfo())


@pytest.mark.parametrize("missing", FLAGS.split()[2:])
def test_a_processor_without_one_of_the_flags_does_not(missing: str):
    assert not needs_help(cpuinfo(flags=FLAGS.replace(missing, "")))


@pytest.mark.parametrize("text", [cpuinfo(vendor="GenuineIntel"), "", "CPU implementer\t: 0x41\n", "flags"])
def test_other_processors_do_not(text: str):
    assert not needs_help(text)


def test_llorch_chooses_the_kernels_before_numpy_is_loaded():
    file = Path("/proc/cpuinfo")
    if not file.exists() or not needs_help(file.read_text()):
        pytest.skip("NOT RUN: this is not an AMD processor with AVX512 under Linux")
    alone, with_llorch = (run(f"import {name}, numpy\n{CORE}") for name in ("os", "llorch"))
    assert with_llorch == "SkylakeX"
    assert run(f"import llorch, numpy\n{CORE}", OPENBLAS_CORETYPE=alone) == alone  # the user's word counts


def test_nothing_is_set_when_numpy_is_there_already_or_the_user_has_chosen():
    show = 'import os, numpy, llorch; print(os.environ.get("OPENBLAS_CORETYPE"))'
    assert run(show) == "None"
    assert run(show.replace("numpy, llorch", "llorch, numpy"), OPENBLAS_CORETYPE="Haswell") == "Haswell"
