"""Products of a few rows with a matrix of ggml's blocks, by ggml's own functions.

    y = round(x) W^T        rounding of x and sums as in llama.cpp's CPU backend

The library is the one that llama-cpp-python installs. Only its table of types is used: the functions that round a row
and that multiply two rows. `vec_dot.c` has the loop over rows. A library of another version is refused, because its
table may have another layout; one that computes another product than `llorch.ops.rounding` is refused, too.

Source: llama.cpp ggml/include/ggml-cpu.h (ggml_get_type_traits_cpu), as of ggml 0.25.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from jaxtyping import Float32, UInt8

from llorch.ops.compiled.library import library
from llorch.ops.compiled.products import threaded_library
from llorch.ops.rounding import quantize_blocks, round_activations
from llorch.runtime.errors import UserError

PACKAGE = "llama-cpp-python==0.3.36"  # has a library of this version
VERSION = "0.25."  # of ggml, whose table of types is known here
_Q8_0 = 8  # number of the type whose product is checked
_ROUNDING = 2.0**-20  # error of a float32 sum over the sum of the magnitudes of its terms


class NoKernels(UserError):
    """Error of kernels of ggml that cannot be used here; the message is the reason."""


class _Functions(ctypes.Structure):
    """Functions of a type, `struct ggml_type_traits_cpu`."""

    _fields_ = (
        ("from_float", ctypes.c_void_p),
        ("vec_dot", ctypes.c_void_p),
        ("vec_dot_type", ctypes.c_int),
        ("n_rows", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class GgmlMatrix:
    """Matrix of blocks, as in its file, whose products ggml computes; the blocks must not change."""

    rows: UInt8[np.ndarray, "out bytes"]
    width: int
    rounded_bytes: int  # of a row of rounded inputs
    from_float: int  # address of the function that rounds a row
    vec_dot: int  # address of the function that multiplies two rows

    def multiply(self, x: Float32[np.ndarray, "seq in"]) -> Float32[np.ndarray, "seq out"]:
        """Round and multiply every row of `x`; MemoryError if memory for the rounded rows is lacking."""
        x, y = np.ascontiguousarray(x), np.empty((len(x), len(self.rows)), np.float32)
        out, row_bytes = self.rows.shape
        if threaded_library().llorch_vec_dot(
            self.from_float, self.vec_dot, self.rows.ctypes.data, row_bytes, x.ctypes.data, self.rounded_bytes,
            y.ctypes.data, len(x), out, self.width,
        ):  # fmt: skip
            raise MemoryError(f"linear: cannot allocate memory for {len(x)} rows")
        return y


@dataclass(frozen=True, slots=True)
class GgmlKernels:
    """Libraries of ggml: `base` has the sizes of types, `cpu` their functions."""

    version: str
    base: ctypes.CDLL
    cpu: ctypes.CDLL

    def matrix(self, ggml_type: int, rows: UInt8[np.ndarray, "out bytes"], width: int) -> GgmlMatrix:
        """Bind a matrix (out, width) of a type of ggml, by its number; NoKernels if ggml cannot multiply it."""
        functions = self.cpu.ggml_get_type_traits_cpu(ggml_type).contents
        rounded = functions.vec_dot_type
        from_float = self.cpu.ggml_get_type_traits_cpu(rounded).contents.from_float
        if not (functions.vec_dot and from_float):
            raise NoKernels(f"ggml {self.version} has no product of the type with number {ggml_type}")
        row_bytes = self.base.ggml_row_size(ggml_type, width)
        if rows.shape[1] != row_bytes:
            raise NoKernels(f"ggml {self.version}: expected rows of {row_bytes} bytes, got {rows.shape[1]}")
        rounded_bytes = self.base.ggml_row_size(rounded, width)
        return GgmlMatrix(np.ascontiguousarray(rows), width, rounded_bytes, from_float, functions.vec_dot)


@cache
def ggml_kernels() -> GgmlKernels:
    """Load ggml's kernels without importing llama_cpp, and check a product; NoKernels if they cannot be used."""
    if library() is None:
        raise NoKernels("llorch's C kernels are not built, which call ggml's; llorch doctor has the reason")
    kernels = _load(_library_folder())
    _check_product(kernels)
    return kernels


def why_absent() -> str:
    """Return why ggml's kernels cannot be used here; "" if they can."""
    try:
        ggml_kernels()
    except NoKernels as error:
        return str(error)
    return ""


def _library_folder() -> Path:
    package = find_spec("llama_cpp")
    if package is None or package.origin is None:
        raise NoKernels(f"llama-cpp-python is not installed (pip install {PACKAGE})")
    return Path(package.origin).parent / "lib"


def _load(folder: Path) -> GgmlKernels:
    """Load both libraries of a folder, the base first, and check their version."""
    try:
        base, cpu = (ctypes.CDLL(str(folder / f"libggml-{name}.so")) for name in ("base", "cpu"))
        base.ggml_version.restype = ctypes.c_char_p
        base.ggml_row_size.restype, base.ggml_row_size.argtypes = ctypes.c_size_t, [ctypes.c_int, ctypes.c_int64]
        cpu.ggml_get_type_traits_cpu.restype = ctypes.POINTER(_Functions)
        cpu.ggml_get_type_traits_cpu.argtypes = [ctypes.c_int]
        initialise = cpu.ggml_cpu_init
    except (OSError, AttributeError) as error:  # no such file; no such function
        raise NoKernels(f"cannot load ggml: {error}") from None
    version = base.ggml_version().decode()
    if not version.startswith(VERSION):
        raise NoKernels(f"expected ggml {VERSION}x, got {version} (pip install {PACKAGE})")
    initialise()
    return GgmlKernels(version, base, cpu)


def _check_product(kernels: GgmlKernels) -> None:
    """Compare a product of two blocks of Q8_0 with NumPy's."""
    random = np.random.default_rng(0)
    x, weights = (random.normal(size=(rows, 64)).astype(np.float32) for rows in (3, 5))
    codes, scales = quantize_blocks(weights, "Q8_0")
    blocks = np.concatenate([scales[..., None].view(np.uint8), codes.reshape(5, 2, 32).view(np.uint8)], axis=-1)
    actual = kernels.matrix(_Q8_0, blocks.reshape(5, -1), 64).multiply(x)
    decoded = codes * np.repeat(scales, 32, axis=-1).astype(np.float32)
    rounded = round_activations(x, "Q8_0")
    require_product(actual, rounded @ decoded.T, np.abs(rounded) @ np.abs(decoded).T, "Q8_0")


def require_product(actual: np.ndarray, expected: np.ndarray, magnitudes: np.ndarray, name: str) -> None:
    """Compare ggml's product for the type `name` with llorch's; NoKernels if they differ by more than float32 rounding.

    `magnitudes` are the sums of the magnitudes of the terms of each product.
    """
    wrong = ~(np.abs(actual - expected) <= _ROUNDING * magnitudes)
    if wrong.any():
        index = np.unravel_index(np.argmax(wrong), wrong.shape)
        raise NoKernels(f"ggml's product of {name}: expected {expected[index]:.7g}, got {actual[index]:.7g}")
