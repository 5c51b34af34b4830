"""Products and decoding in C, called by NumPy: every type of ggml, against float64 and the decoders of files."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.refusals import refuses

from llorch.files.quant import BLOCK_SIZES, GGMLType, decode_by_reference
from llorch.judging.expectations.quantised_models import matrix_bytes
from llorch.ops.compiled import products
from llorch.ops.compiled.library import library
from llorch.ops.compiled.products import FEW, KINDS, CompiledMatrix, is_available
from llorch.runtime.threads import VARIABLES, limit_threads, n_cores

TYPES = [GGMLType[name] for name in KINDS if not name.startswith("TABLE")]
SMALL_BLOCKS = [kind for kind in TYPES if BLOCK_SIZES[kind][0] <= 32]
EVERY_TYPE = pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
OUT = 37
pytestmark = pytest.mark.skipif(library() is None, reason="NOT RUN: no C compiler")


def make_matrix(kind: GGMLType, n_in: int) -> tuple[CompiledMatrix, np.ndarray]:
    """A matrix of random blocks, and its numbers as the reference decodes them."""
    decoded = np.random.default_rng(0).standard_normal((OUT, n_in)).astype(np.float32)
    raw = decoded.copy().view(np.uint8) if kind is GGMLType.F32 else matrix_bytes(kind, (OUT, n_in), key=kind.name)
    if kind is not GGMLType.F32:
        decode_by_reference(raw, kind, decoded)
    return CompiledMatrix(kind.name, (OUT, n_in), raw.reshape(OUT, -1)), decoded


def assert_product(matrix: CompiledMatrix, decoded: np.ndarray, rows: int) -> None:
    x = np.random.default_rng(rows).standard_normal((rows, decoded.shape[1])).astype(np.float32)
    actual, expected = matrix.multiply(x), x.astype(np.float64) @ decoded.astype(np.float64).T
    assert (actual.shape, actual.dtype) == (expected.shape, np.float32)
    assert np.linalg.norm(actual - expected) < 1e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize("n_super_blocks", [1, 5])
@pytest.mark.parametrize("rows", [1, 3, FEW])
@EVERY_TYPE
def test_product_is_exact_to_float32_rounding(kind: GGMLType, rows: int, n_super_blocks: int):
    assert_product(*make_matrix(kind, 256 * n_super_blocks), rows)


@pytest.mark.parametrize("n_blocks", [1, 3])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", SMALL_BLOCKS, ids=lambda kind: kind.name)
def test_rows_of_an_odd_number_of_blocks_are_multiplied_to_the_end(kind: GGMLType, rows: int, n_blocks: int):
    assert_product(*make_matrix(kind, 32 * n_blocks), rows)


@EVERY_TYPE
def test_rows_are_decoded_from_any_first_row_to_the_bits_of_the_reference(kind: GGMLType):
    matrix, decoded = make_matrix(kind, 512)
    for first, last in ((0, OUT), (5, 6), (30, OUT)):
        actual = np.empty((last - first, 512), np.float32)
        matrix.decode_into(first, actual)
        np.testing.assert_array_equal(actual.view(np.uint32), decoded[first:last].view(np.uint32))


def test_only_floats_are_dense():
    codes = np.empty((1, 1))
    assert [kind for kind in KINDS if CompiledMatrix(kind, (1, 32), codes).is_dense] == ["F32", "BF16", "F16"]


@pytest.mark.parametrize("kind", [GGMLType.F32, GGMLType.Q8_0, GGMLType.Q4_K], ids=lambda kind: kind.name)
def test_columns_in_another_order_are_multiplied_and_decoded_in_the_order_of_the_matrix(kind: GGMLType):
    stored, decoded = make_matrix(kind, 256)
    order, expected, actual = np.random.default_rng(1).permutation(256), np.empty_like(decoded), np.empty_like(decoded)
    matrix = CompiledMatrix(stored.kind, stored.shape, stored.codes, order=order)
    expected[:, order] = decoded
    matrix.decode_into(0, actual)
    np.testing.assert_array_equal(actual, expected)
    assert_product(matrix, expected, 2)


def test_inputs_that_are_not_contiguous_are_multiplied():
    matrix, _ = make_matrix(GGMLType.Q6_K, 256)
    x = np.random.default_rng(2).standard_normal((256, 3)).astype(np.float32).T
    np.testing.assert_array_equal(matrix.multiply(x), matrix.multiply(np.ascontiguousarray(x)))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of threads that are set in a library without memory."""
    numbers: list[int] = []
    fake = SimpleNamespace(omp_set_num_threads=numbers.append, llorch_product=lambda *arguments: 1)
    monkeypatch.setattr(products, "library", lambda: fake)
    return numbers


@pytest.mark.usefixtures("threads")
def test_lack_of_memory_is_reported():
    with refuses(MemoryError, "3 rows", where="linear"):
        CompiledMatrix("F32", (2, 32), np.zeros((2, 32), np.float32)).multiply(np.zeros((3, 32), np.float32))


REPOSITORY = Path(__file__).parents[3]
FORK = """
import os, signal
import numpy as np
from llorch.ops.compiled.products import CompiledMatrix
from llorch.runtime.threads import limit_threads
weight, x = np.ones((64, 1024), np.float32), np.ones((1, 1024), np.float32)
matrix = CompiledMatrix("F32", weight.shape, weight)
with limit_threads(2):
    matrix.multiply(x)
    if (child := os.fork()) == 0:
        signal.alarm(20)
        os._exit(int(not np.array_equal(matrix.multiply(x), x @ weight.T)))
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="NOT RUN: no fork on this system")
def test_a_forked_process_multiplies_after_a_product_on_two_threads():
    assert subprocess.run([sys.executable, "-c", FORK], cwd=REPOSITORY, timeout=60).returncode == 0


def test_number_of_threads_is_set_by_the_user(threads: list[int], monkeypatch: pytest.MonkeyPatch):
    for setting in ("", "3"):
        for variable in VARIABLES:
            monkeypatch.setenv(variable, setting)
        products.threaded_library()
    with limit_threads(2):
        products.threaded_library()
    assert threads == [n_cores(), 3, 2]


@pytest.mark.parametrize("is_built", [True, False])
def test_library_is_available_if_it_is_built(is_built: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "find_compiler", lambda: ["cc"])
    monkeypatch.setattr(products, "library", lambda: object() if is_built else None)
    assert is_available.__wrapped__() is is_built


def test_without_a_compiler_nothing_is_built_nor_logged(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "find_compiler", lambda: None)
    monkeypatch.setattr(products, "library", pytest.fail)
    assert not is_available.__wrapped__()
