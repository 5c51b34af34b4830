"""Products whose sums have one order: a row has the same bits in any company, from any build of the C files."""

import ctypes
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from helpers.shared_folder import shared_folder
from torch.nn.functional import linear

from llorch.files.quantised.codes import E4M3
from llorch.pytorch.kernels.cpu import library as cpu_library
from llorch.pytorch.kernels.cpu.library import library
from llorch.pytorch.kernels.cpu.linear import CpuLinear
from llorch.pytorch.kernels.cpu.quantised import KINDS, CpuQuantisedLinear
from llorch.pytorch.kernels.packing import Table, decode
from llorch.pytorch.random_weights import random_fields

SLOW_BUILD = pytest.mark.slow_cases("AVX2*", "no bytes*")  # 8 s of compiling
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SHAPES = [(96, 64), (7, 37), (45, 1056), (33, 2100)]  # outs and widths that fill no vector, tile or part of a sum, too
ROWS = 300  # more than a block of rows that stays in a cache
BUILDS = {  # without AMX, without look-ups of bytes, with shorter registers, in plain C
    "native": None, "no tiles": ("-march=native", "-mno-amx-bf16"), "no bytes": ("-march=native", "-mno-avx512vbmi"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"), "plain": (),
}  # fmt: skip
LACKING = {"no tiles": "amx_bf16", "no bytes": "avx512vbmi"}  # features without which a build is the native one
PARTS = ("cpu_products.c", "cpu_fixed.c")  # all that products of fixed order need
FUNCTIONS = ("llorch_fixed_product", "llorch_decode")


@pytest.fixture(scope="module", params=BUILDS)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    flags, features = BUILDS[request.param], Path("/proc/cpuinfo").read_text().split()
    lacking = LACKING.get(request.param)
    if flags is None or (lacking and lacking not in features):  # the same instructions
        return cast(ctypes.CDLL, library())
    if request.param == "AVX2" and "avx2" not in features:
        pytest.skip("NOT RUN: this processor has no AVX2")
    kept, made = shared_folder(tmp_path_factory) / f"{request.param}.so", tmp_path_factory.mktemp("build") / "made.so"
    with pytest.MonkeyPatch.context() as context:
        context.setattr(cpu_library, "FLAGS", [flag for flag in cpu_library.FLAGS if "native" not in flag] + [*flags])
        context.setattr(cpu_library, "SOURCES", [path for path in cpu_library.SOURCES if path.name in PARTS])
        context.setattr(cpu_library, "SIGNATURES", {name: cpu_library.SIGNATURES[name] for name in FUNCTIONS})
        try:
            if not kept.exists():  # no other worker has built it
                cpu_library.build(cpu_library.find_compiler() or [], made)
                made.replace(kept)
        except cpu_library.NotBuilt as error:  # of another processor
            pytest.skip(f"NOT RUN: {error}")
        return cpu_library.declared(ctypes.CDLL(str(kept)))


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)).to(dtype)


def assert_alone(kernel: CpuLinear | CpuQuantisedLinear, x: torch.Tensor, whole: torch.Tensor) -> None:
    """Every row has the bits that it has alone, and in passes of other sizes."""
    assert torch.equal(torch.cat([kernel(row) for row in x[:40].split(1)]), whole[:40])
    for size in (3, 16, 31, 70):
        assert torch.equal(torch.cat([kernel(rows) for rows in x.split(size)]), whole), size


@SLOW_BUILD
@DTYPES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_bits_that_it_has_alone(shape, bias, dtype, compiled):
    weight = numbers(*shape, dtype=dtype, seed=1)
    kernel = CpuLinear(weight, numbers(shape[0], dtype=dtype, seed=2) if bias else None, compiled, fixed=True)
    x = numbers(ROWS, shape[1], dtype=dtype, seed=3)
    whole = kernel(x)
    assert_alone(kernel, x, whole)
    assert kernel(x[:0]).shape == (0, shape[0])
    exact = linear(x.double(), weight.double(), None if kernel.bias is None else kernel.bias.double())
    assert whole.dtype == dtype
    near = linear(x, weight, kernel.bias).double()
    assert (whole.double() - exact).norm() <= max(1.01 * (near - exact).norm(), 3e-7 * exact.norm())


@SLOW_BUILD
@DTYPES
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_packed_matrix_has_the_bits_of_the_decoded_one(kind, dtype, compiled):
    torch.manual_seed(0)
    fields = random_fields((45, 2304), kind, torch.device("cpu"))
    kernel = CpuQuantisedLinear(fields, kind, numbers(45, dtype=dtype, seed=2), compiled, fixed=True)
    x = numbers(80, 2304, dtype=dtype, seed=3)
    whole = kernel(x)
    assert_alone(kernel, x, whole)
    assert torch.equal(CpuLinear(decode(fields, kind).to(dtype), kernel.bias, compiled, fixed=True)(x), whole)


@SLOW_BUILD
@DTYPES
def test_infinity_and_nan_stay_in_their_row(dtype, compiled):
    kernel = CpuLinear(numbers(40, 64, dtype=dtype, seed=1), None, compiled, fixed=True)
    x = numbers(20, 64, dtype=dtype, seed=3)
    x[3, 0], x[5, 0] = torch.inf, torch.nan
    actual = kernel(x)
    assert actual[3].isinf().all()
    assert actual[5].isnan().all()
    assert actual.isfinite().all(1).sum() == 18


@SLOW_BUILD
def test_every_float8_code_has_its_number(compiled):
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 127 == 127] = 0  # those of NaN
    table, scale = Table("TABLE_8", E4M3.tobytes()), torch.full((8, 1), 0.75)
    kernel = CpuQuantisedLinear({"codes": codes.view(8, 32), "d": scale}, table, None, compiled, fixed=True)
    assert torch.equal(kernel(torch.eye(32)).T.flatten(), codes.view(torch.float8_e4m3fn).float() * 0.75)
