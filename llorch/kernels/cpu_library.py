"""The compiled part of the CPU kernels, the C files beside this one, built for this very processor when needed.

Building takes half a second with any compiler that knows OpenMP. It is done anew in every process, in a temporary
folder, so there is no store of binaries to grow old. A machine without such a compiler runs on what torch has, which is
said once. The loops share torch's OpenMP threads, because torch's library is loaded before.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

SOURCES = tuple(Path(__file__).with_name(name) for name in ("cpu_products.c", "cpu_layer.c", "cpu_block.c"))
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_MATRIX = (_INT, _POINTER, _POINTER, _POINTER, _POINTER, _INT)
SIGNATURES = {
    "llorch_product": (_INT, (*_MATRIX, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG)),
    "llorch_decode": (None, (*_MATRIX, _POINTER, _LONG, _LONG, _LONG)),
    "llorch_rms_norm": (None, (_INT, _POINTER, _POINTER, _FLOAT, _POINTER, _LONG, _LONG)),
    "llorch_rope": (None, (_INT, _POINTER, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG)),
    "llorch_append": (_INT, (_POINTER, _POINTER, _POINTER, *[_LONG] * 5)),
    "llorch_swiglu": (None, (_INT, _POINTER, _POINTER, _POINTER, _LONG)),
    "llorch_attend": (_INT, (_INT, *[_POINTER] * 5, *[_LONG] * 8)),
    "llorch_block": (_INT, (_POINTER, _POINTER, _POINTER, _POINTER)),
}


@cache
def library() -> ctypes.CDLL | None:
    """Build and load the kernels.

    Returns:
        The library, or None, after a note on stderr, where it cannot be built.
    """
    compiler, why = find_compiler(), "no C compiler is installed"
    if compiler is not None:
        with tempfile.TemporaryDirectory(prefix="llorch-") as folder:
            built = Path(folder) / "cpu_products.so"
            why = build(compiler, built)
            if not why:
                return declared(ctypes.CDLL(str(built)))
    slower = "tokens take at least twice as long, with packed weights many times"
    print(f"note: CPU kernels are not built, so {slower}: {why}", file=sys.stderr)
    return None


def find_compiler() -> str | None:
    """Path of the compiler named by the environment variable CC, or of the first that is installed."""
    return next((path for name in (os.environ.get("CC", ""), *COMPILERS) if (path := shutil.which(name))), None)


def build(compiler: str, target: Path) -> str:
    """Compile the kernels.

    Args:
        compiler: Its path.
        target: File to write.

    Returns:
        Why that failed; empty when it did not.
    """
    command = [compiler, *FLAGS, *map(str, SOURCES), "-o", str(target), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler}: {error}"
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return f"{compiler}: {lines[0]}" if done.returncode else ""


def declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes the signatures of the functions."""
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Address of the elements, which must be contiguous; None is a null pointer."""
    return None if tensor is None else tensor.data_ptr()
