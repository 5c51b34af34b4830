import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.kernel_tolerances import distance
from helpers.refusals import assert_tells, refuses
from torch import nn
from torch.nn.functional import linear

from llorch.ops.compiled import library as cpu_library
from llorch.ops.compiled.library import library
from llorch.pytorch.kernels.cpu import linear as cpu_linear
from llorch.pytorch.kernels.cpu.linear import CpuLinear

SHAPES = [(96, 64), (7, 37), (260, 896)]  # rows and widths that fill no whole vector, too
ROWS = [1, 3, 8, 9, 40]


def parameter(*shape: int, dtype: torch.dtype, seed: int) -> nn.Parameter:
    numbers = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return nn.Parameter(torch.from_numpy(numbers).to(dtype), requires_grad=False)


def layer(shape: tuple[int, int], dtype: torch.dtype, *, bias: bool = True, compiled: bool = True) -> CpuLinear:
    weight, out = parameter(*shape, dtype=dtype, seed=1), shape[0]
    return CpuLinear(weight, parameter(out, dtype=dtype, seed=2) if bias else None, library() if compiled else None)


def reference(x: torch.Tensor, kernel: CpuLinear) -> torch.Tensor:
    return linear(x.double(), kernel.weight.double(), None if kernel.bias is None else kernel.bias.double())


def test_the_kernels_are_built_on_this_machine():
    assert library() is not None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_float32_products_are_exact_to_float32_rounding(shape, rows, compiled, bias):
    kernel = layer(shape, torch.float32, bias=bias, compiled=compiled)
    x = parameter(rows, shape[1], dtype=torch.float32, seed=3)
    actual = kernel(x)
    assert actual.dtype == torch.float32
    assert distance(actual, reference(x, kernel)) < 1e-6


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_products_are_no_worse_than_those_of_torch(shape, rows, bias):
    kernel = layer(shape, torch.bfloat16, bias=bias)
    x = parameter(rows, shape[1], dtype=torch.bfloat16, seed=3)
    actual, expected = kernel(x), reference(x, kernel)
    assert actual.dtype == torch.bfloat16
    assert distance(actual, expected) <= 1.01 * distance(linear(x, kernel.weight, kernel.bias), expected)


def test_a_few_bfloat16_rows_are_the_exact_sums_rounded_once():
    kernel = layer((260, 896), torch.bfloat16)
    x = parameter(2, 896, dtype=torch.bfloat16, seed=3)
    exact = reference(x, kernel)
    off = (kernel(x).double() - exact).abs() / exact.abs()
    assert off.max() <= 2**-8 * 1.001  # half a step of eight bits, and the float32 sum under it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leading_axes_and_strides_of_the_input_do_not_matter(dtype):
    kernel = layer((96, 64), dtype)
    x = parameter(2, 64, 3, dtype=dtype, seed=3).transpose(1, 2)  # (2, 3, 64), not contiguous
    actual = kernel(x)
    assert actual.shape == (2, 3, 96)
    assert distance(actual, reference(x, kernel)) < (1e-6 if dtype is torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_unsupported_onednn_products_use_fallback_kernels(dtype, bias, monkeypatch):
    monkeypatch.setattr(cpu_linear, "onednn_multiplies", lambda dtype: False)
    monkeypatch.setattr(cpu_linear, "TILE", 100 * 896)  # so that 260 rows of weights are three tiles
    kernel = layer((260, 896), dtype, bias=bias)
    x = parameter(40, 896, dtype=dtype, seed=3)
    assert kernel(x).dtype == dtype
    assert distance(kernel(x), reference(x, kernel)) <= 1.01 * max(
        distance(linear(x, kernel.weight, kernel.bias), reference(x, kernel)), 1e-7
    )


def test_onednn_products_are_probed(monkeypatch):
    def refuse(*args):
        raise RuntimeError("could not create a primitive descriptor")

    assert cpu_linear.onednn_multiplies.__wrapped__(torch.float32)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", refuse)
    assert not cpu_linear.onednn_multiplies.__wrapped__(torch.float32)


def test_infinity_and_nan_come_through_a_bfloat16_product():
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    x[0, 0], x[1, 0] = torch.inf, torch.nan
    actual = layer((96, 64), torch.bfloat16, bias=False)(x)
    assert actual[0].isinf().all()
    assert actual[1].isnan().all()


def test_an_input_of_another_dtype_is_refused():
    kernel = layer((96, 64), torch.float32)
    with refuses(ValueError, expected="torch.float32", got="torch.bfloat16"):
        kernel(torch.zeros(1, 64, dtype=torch.bfloat16))


def test_missing_compiler_warns_once_and_continues(monkeypatch, caplog):
    monkeypatch.setattr(cpu_library, "find_compiler", lambda: None)
    cpu_library.library.cache_clear()
    try:
        assert [library(), library()] == [None, None]
    finally:
        cpu_library.library.cache_clear()
    (line,) = caplog.messages
    assert_tells(line, "CPU", "compiler")


PACKING = "llorch_pack_codes"  # the function of packing.c


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_failing_compiler_error_is_quoted(tmp_path):
    compiler = script(tmp_path / "cc", "echo 'cc: error: no -fopenmp here' >&2\nexit 1")
    with refuses(cpu_library.NotBuilt, f"{compiler}: cc: error: no -fopenmp here"):
        cpu_library.build([compiler], tmp_path / "made.so")


def test_a_compiler_named_by_the_environment_comes_first(tmp_path, monkeypatch):
    compiler = script(tmp_path / "my cc", "")
    monkeypatch.setenv("CC", f"'{compiler}' gcc -pipe")
    assert cpu_library.find_compiler() == [compiler, "gcc", "-pipe"]
    monkeypatch.setenv("CC", "nowhere gcc")
    assert cpu_library.find_compiler() == [shutil.which("cc")]


@pytest.fixture(scope="module")
def library_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A library of one source, as a compiler makes it on this machine, in little time."""
    command, path = cpu_library.find_compiler(), tmp_path_factory.mktemp("made") / "made.so"
    assert command is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_library, "FLAGS", ("-O0", *cpu_library.FLAGS[1:]))
        patch.setattr(cpu_library, "SOURCES", [path for path in cpu_library.SOURCES if path.name == "packing.c"])
        cpu_library.build(command, path)
    return path.read_bytes()


@pytest.fixture
def n_linked(library_bytes, tmp_path, monkeypatch) -> Callable[[], int]:
    """Put a compiler that has its result ready behind another command, and provide a cache of its own.

    Returns:
        A function that tells how often a library was linked.
    """
    log, ready = tmp_path / "log", tmp_path / "ready.so"
    ready.write_bytes(library_bytes)
    answer = f'case "$*" in *--version*) exec "$@" ;; *" -c "*) exit ;; esac\necho >> "{log}"'
    copy = f'while [ "$1" != -o ]; do shift; done\ncp "{ready}" "$2"'
    wrapper = script(tmp_path / "ccache", f"{answer}\n{copy}")
    monkeypatch.setenv("CC", f"{wrapper} cc")
    monkeypatch.setattr(cpu_library, "SIGNATURES", {PACKING: cpu_library.SIGNATURES[PACKING]})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda: len(log.read_text()) if log.exists() else 0


def load_library() -> ctypes.CDLL | None:
    """The library as a new process gets it."""
    return cpu_library.library.__wrapped__()


@pytest.mark.slow
def test_built_library_is_cached_for_the_next_process(n_linked, tmp_path):
    assert [load_library() is None, load_library() is None, n_linked()] == [False, False, 1]
    (folder,) = (tmp_path / "cache").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.suffix for path in folder.iterdir()] == [".so"]


@pytest.mark.parametrize("damage", [lambda data: data[:4096], lambda data: b"", lambda data: data[:-40] + data[-39:]])
def test_damaged_library_is_rebuilt(damage, n_linked, tmp_path):
    load_library()
    (file,) = (tmp_path / "cache" / "llorch").iterdir()
    whole = file.read_bytes()
    file.unlink()  # it is mapped
    file.write_bytes(damage(whole))
    assert load_library() is not None
    assert n_linked() == 2
    assert cpu_library.is_sealed(file)


def test_library_name_depends_on_source_compiler_and_processor(n_linked, monkeypatch):
    command = cpu_library.find_compiler() or []
    names = {cpu_library.identity(command), cpu_library.identity([*command, "-g"])}
    monkeypatch.setattr(cpu_library, "_processor", lambda: ["another"])
    names.add(cpu_library.identity(command))
    monkeypatch.setattr(cpu_library, "FLAGS", (*cpu_library.FLAGS, "-g"))
    assert len({*names, cpu_library.identity(command)}) == 4


@pytest.mark.parametrize("obstacle", ["others may write to it", "no folder", "not loadable"])
def test_every_process_builds_without_a_private_cache_folder(obstacle, n_linked, tmp_path, monkeypatch):
    folder = tmp_path / "cache" / "llorch"
    if obstacle == "no folder":
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    else:
        folder.mkdir(parents=True)
        folder.chmod(0o777 if obstacle == "others may write to it" else 0o700)
    if obstacle == "not loadable":
        refuse_to_load_from(folder, monkeypatch)
    assert [load_library() is None, load_library() is None] == [False, False]
    assert n_linked() == (4 if obstacle == "not loadable" else 2)
    assert not folder.exists() or [*folder.iterdir()] == []


def test_unloadable_library_warns_and_continues(n_linked, monkeypatch, caplog):
    refuse_to_load_from(Path("/"), monkeypatch)
    assert load_library() is None
    (line,) = caplog.messages
    assert_tells(line, "CPU")
    assert line.endswith("failed to map segment from shared object")


def refuse_to_load_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system mounted noexec does."""
    load = ctypes.CDLL

    def refusing(name: str) -> ctypes.CDLL:
        if Path(name).is_relative_to(folder):
            raise OSError(f"{name}: failed to map segment from shared object")
        return load(name)

    monkeypatch.setattr(cpu_library.ctypes, "CDLL", refusing)
