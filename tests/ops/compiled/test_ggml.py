import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.ggml_kernels import HAS_GGML
from helpers.refusals import refuses

from llorch.ops.compiled import ggml
from llorch.ops.compiled.ggml import NoKernels, ggml_kernels, why_absent
from llorch.ops.rounding import quantize_blocks, round_activations

Q8_0, Q8_K, F64 = 8, 15, 28  # numbers of types


@pytest.fixture(autouse=True)
def _fresh_cache() -> Iterator[None]:
    ggml_kernels.cache_clear()
    yield
    ggml_kernels.cache_clear()


@pytest.fixture(scope="module")
def kernels() -> ggml.GgmlKernels:
    if not HAS_GGML:
        pytest.skip("NOT RUN: no llama_cpp or no C compiler")
    return ggml_kernels()


def q8_0(out: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and values of a random matrix."""
    codes, scales = quantize_blocks(np.random.default_rng(1).normal(size=(out, width)).astype(np.float32), "Q8_0")
    blocks = [scales[..., None].view(np.uint8), codes.reshape(out, -1, 32).view(np.uint8)]
    return np.concatenate(blocks, axis=-1).reshape(out, -1), codes * np.repeat(scales, 32, axis=-1).astype(np.float32)


@pytest.mark.parametrize("out", [1, 16, 17, 700])
@pytest.mark.parametrize("n", [0, 1, 31, 33, 70])
def test_every_row_of_the_matrix_meets_every_token(kernels: ggml.GgmlKernels, n: int, out: int):
    rows, values = q8_0(out, 96)
    x = np.random.default_rng(2).normal(size=(n, 96)).astype(np.float32)
    actual = kernels.matrix(Q8_0, rows, 96).multiply(x)
    np.testing.assert_allclose(actual, round_activations(x, "Q8_0") @ values.T, rtol=0, atol=2e-5)
    one_by_one = [kernels.matrix(Q8_0, rows, 96).multiply(row[None])[0] for row in x]
    np.testing.assert_array_equal(actual, np.reshape(one_by_one, actual.shape).astype(np.float32))


def test_inputs_need_not_be_contiguous(kernels: ggml.GgmlKernels):
    matrix = kernels.matrix(Q8_0, q8_0(5, 96)[0], 96)
    x = np.random.default_rng(2).normal(size=(96, 4)).astype(np.float32).T
    np.testing.assert_array_equal(matrix.multiply(x), matrix.multiply(x.copy()))


@pytest.mark.parametrize("number", [Q8_K, F64])
def test_a_type_without_a_product_is_refused(kernels: ggml.GgmlKernels, number: int):
    with refuses(NoKernels, "no product", str(number)):
        kernels.matrix(number, np.zeros((2, 292), np.uint8), 256)


def test_rows_of_another_size_are_refused(kernels: ggml.GgmlKernels):
    with refuses(NoKernels, "102 bytes", "got 101"):
        kernels.matrix(Q8_0, np.zeros((2, 101), np.uint8), 96)


def test_lacking_memory_is_an_error(kernels: ggml.GgmlKernels):
    matrix = replace(kernels.matrix(Q8_0, q8_0(5, 96)[0], 96), rounded_bytes=1 << 60)
    with refuses(MemoryError, "3 rows"):
        matrix.multiply(np.zeros((3, 96), np.float32))


def test_without_llama_cpp_the_reason_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ggml, "find_spec", lambda name: None)
    assert f"pip install {ggml.PACKAGE}" in why_absent()


def test_without_a_compiler_the_reason_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ggml, "library", lambda: None)
    assert "C kernels" in why_absent()


def test_a_folder_without_the_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(ggml, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert "libggml-base.so" in why_absent()


def test_another_version_is_refused_before_its_table_is_read(
    kernels: ggml.GgmlKernels, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ggml, "VERSION", "0.99.")
    assert "expected ggml 0.99.x, got 0.25." in why_absent()


WRONG: dict[str, Callable] = {
    "a factor": lambda x, kind: round_activations(x, kind) * np.float32(1 + 1e-5),
    "not rounded": lambda x, kind: x,
    "nan": lambda x, kind: np.full_like(x, np.nan),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_library_with_another_product_is_refused(
    kernels: ggml.GgmlKernels, monkeypatch: pytest.MonkeyPatch, wrong: str
):
    monkeypatch.setattr(ggml, "round_activations", WRONG[wrong])
    assert "ggml's product of Q8_0" in why_absent()


def test_the_package_is_the_one_that_the_extra_pins():
    assert f'"{ggml.PACKAGE}"' in (Path(__file__).parents[3] / "pyproject.toml").read_text()


def test_llama_cpp_is_not_imported(kernels: ggml.GgmlKernels):
    code = (
        "import sys; from llorch.ops.compiled.ggml import why_absent; why_absent(); print('llama_cpp' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
