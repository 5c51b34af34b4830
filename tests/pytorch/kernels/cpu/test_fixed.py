"""Products whose sums have one order, in any company and build; kernels of a delta net and of experts."""

import ctypes
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from helpers.kernel_tolerances import distance
from helpers.refusals import refuses
from helpers.shared_folder import shared_folder
from torch.nn.functional import linear

from llorch.files.quant import BLOCK_SIZES, SCALE_OFFSETS, GGMLType
from llorch.files.quantised.codes import E4M3
from llorch.files.quantised.fields import Table
from llorch.ops.compiled import library as cpu_library
from llorch.ops.compiled.library import library
from llorch.pytorch.kernels.cpu.delta_net import CpuDeltaRule, CpuGatedNorm, CpuL2Norm, CpuShortConv
from llorch.pytorch.kernels.cpu.experts import FEW, CpuExperts
from llorch.pytorch.kernels.cpu.linear import CpuLinear
from llorch.pytorch.kernels.cpu.quantised import CpuQuantisedLinear
from llorch.pytorch.kernels.packing import CPU_BLOCK_TYPES, HALF_TYPES, decode
from llorch.pytorch.models.delta_net import GatedNorm, ShortConv, l2_norm
from llorch.pytorch.models.delta_rule import delta_rule
from llorch.pytorch.models.experts import ExpertLinear, QuantisedExperts
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
PARTS = ("products.c", "fixed.c")  # all that products of fixed order need
FUNCTIONS = ("llorch_fixed_product", "llorch_decode", "llorch_product")
EXTREMES = np.array([0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504.0, -65504.0, np.inf, -np.inf, np.nan], "<f2")


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
        return cpu_library.declare_signatures(ctypes.CDLL(str(kept)))


def random_values(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)).to(dtype)


def assert_batch_invariant(kernel: CpuLinear | CpuQuantisedLinear, x: torch.Tensor, full_product: torch.Tensor) -> None:
    """Every row has the bits that it has alone, and in passes of other sizes."""
    assert torch.equal(torch.cat([kernel(row) for row in x[:40].split(1)]), full_product[:40])
    for size in (3, 16, 31, 70):
        assert torch.equal(torch.cat([kernel(rows) for rows in x.split(size)]), full_product), size


@SLOW_BUILD
@DTYPES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_row_has_the_same_bits_in_any_batch(shape, bias, dtype, compiled):
    weight = random_values(*shape, dtype=dtype, seed=1)
    kernel = CpuLinear(weight, random_values(shape[0], dtype=dtype, seed=2) if bias else None, compiled, fixed=True)
    x = random_values(ROWS, shape[1], dtype=dtype, seed=3)
    whole = kernel(x)
    assert_batch_invariant(kernel, x, whole)
    assert kernel(x[:0]).shape == (0, shape[0])
    exact = linear(x.double(), weight.double(), None if kernel.bias is None else kernel.bias.double())
    assert whole.dtype == dtype
    near = linear(x, weight, kernel.bias).double()
    assert (whole.double() - exact).norm() <= max(1.01 * (near - exact).norm(), 3e-7 * exact.norm())


@SLOW_BUILD
@DTYPES
@pytest.mark.parametrize("kind", [*CPU_BLOCK_TYPES, *HALF_TYPES], ids=lambda kind: kind.name)
def test_packed_product_has_the_bits_of_the_decoded_one(kind, dtype, compiled):
    torch.manual_seed(0)
    fields = random_fields((45, 2304), kind, torch.device("cpu"))
    bias, x = random_values(45, dtype=dtype, seed=2), random_values(80, 2304, dtype=dtype, seed=3)
    kernel = CpuQuantisedLinear(fields, kind, bias, compiled, fixed=True)
    whole = kernel(x)
    assert_batch_invariant(kernel, x, whole)
    assert torch.equal(CpuLinear(decode(fields, kind).to(dtype), bias, compiled, fixed=True)(x), whole)
    exact = linear(x.double(), decode(fields, kind).double(), bias.double())
    for rows in (1, 3):  # whose sums have other orders
        actual = CpuQuantisedLinear(fields, kind, bias, compiled)(x[:rows])
        assert distance(actual, exact[:rows]) < (1e-6 if dtype is torch.float32 else 3e-3)


@SLOW_BUILD
@DTYPES
@pytest.mark.parametrize("n_blocks", [1, 9])
@pytest.mark.parametrize("kind", CPU_BLOCK_TYPES, ids=lambda kind: kind.name)
def test_any_bytes_and_extreme_scales_are_decoded_to_the_bits_of_numpy(kind, n_blocks, dtype, compiled):
    size, n_bytes = BLOCK_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (2, len(EXTREMES), n_blocks, n_bytes), dtype=np.uint8)
    for scale, offset in enumerate(SCALE_OFFSETS[kind]):  # of a minimum, another number than of its scale
        blocks[1, ..., offset : offset + 2] = np.roll(EXTREMES, scale)[:, None, None].view(np.uint8)
    if kind is GGMLType.MXFP4:
        blocks[..., 0] = np.resize([0, 1, 2, 3, 9, 119, 128, 250, 253, 254, 255], blocks.shape[:-1])
    fields = {"blocks": torch.from_numpy(blocks.reshape(-1, n_blocks * n_bytes))}
    kernel = CpuQuantisedLinear(fields, kind, None, compiled)
    actual = torch.empty(kernel.out_features - 1, n_blocks * size, dtype=dtype)
    compiled.llorch_decode(*kernel.matrix_of(dtype), actual.data_ptr(), 1, *actual.shape)
    expected = decode(fields, kind)[1:].to(dtype)
    bits = torch.int16 if dtype is torch.bfloat16 else torch.int32
    assert ((actual.view(bits) == expected.view(bits)) | (actual.isnan() & expected.isnan())).all()


@SLOW_BUILD
@DTYPES
def test_infinity_and_nan_stay_in_their_row(dtype, compiled):
    kernel = CpuLinear(random_values(40, 64, dtype=dtype, seed=1), None, compiled, fixed=True)
    x = random_values(20, 64, dtype=dtype, seed=3)
    x[3, 0], x[5, 0] = torch.inf, torch.nan
    actual = kernel(x)
    assert actual[3].isinf().all()
    assert actual[5].isnan().all()
    assert actual.isfinite().all(1).sum() == 18


@SLOW_BUILD
def test_every_float8_code_is_decoded(compiled):
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 127 == 127] = 0  # those of NaN
    table, scale = Table("TABLE_8", E4M3.tobytes()), torch.full((8, 1), 0.75)
    kernel = CpuQuantisedLinear({"codes": codes.view(8, 32), "d": scale}, table, None, compiled, fixed=True)
    assert torch.equal(kernel(torch.eye(32)).T.flatten(), codes.view(torch.float8_e4m3fn).float() * 0.75)


COMPILED = cast(ctypes.CDLL, library())
HALF = pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 3e-7), (torch.bfloat16, 3e-3)], ids=str)


@HALF
@pytest.mark.parametrize("width", [64, 37, 1100])
def test_convolution_equals_the_reference(width, dtype, limit):
    torch.manual_seed(0)
    plain = ShortConv(width, 4)
    plain.weight = torch.nn.Parameter(torch.randn(width, 4, dtype=dtype), requires_grad=False)
    x, before = torch.randn(2, 9, width).to(dtype), torch.randn(2, 3, width).to(dtype)
    ours = CpuShortConv(plain.weight, COMPILED)
    for real in (None, torch.rand(2, 9) > 0.4):
        actual, last = ours(x, before, real)
        expected, want_last = plain.double()(x.double(), before.double(), real)
        at = slice(None) if real is None else real
        assert distance(actual[at], expected[at]) < limit
        assert torch.equal(last.double(), want_last)


@pytest.mark.parametrize(("key", "value"), [(128, 128), (12, 20), (8, 70)])
def test_delta_rule_equals_the_reference_and_split_passes_have_equal_bits(key, value):
    torch.manual_seed(0)
    rows = torch.randn(2, 40, 2 * 2 * key + 6 * value)  # heads are parts of wider rows
    q, k, v = rows.split((2 * key, 2 * key, 6 * value), -1)
    q, k, v = (x.unflatten(-1, (n, -1)) for x, n in ((q, 2), (k, 2), (v, 6)))
    norm, rule = CpuL2Norm(COMPILED), CpuDeltaRule(COMPILED)
    assert distance(norm(k), l2_norm(k.double())) < 3e-7
    q, k = norm(q), norm(k)
    beta, log_decay = (
        torch.rand(2, 40, 6),
        -torch.randn(2, 40, 6).exp() * torch.where(torch.rand(2, 40, 6) > 0.9, 300, 1),
    )
    state = torch.randn(2, 6, key, value)
    expected, end = delta_rule(*(x.double() for x in (q, k, v, beta, log_decay, state)))
    whole, last = rule(q, k, v, beta, log_decay, state.clone())
    assert distance(whole, expected) < 3e-7
    assert distance(last, end) < 3e-7
    parts = state[1:].clone()
    for at in (slice(0, 1), slice(1, 30), slice(30, 40)):
        part, parts = rule(q[1:, at], k[1:, at], v[1:, at], beta[1:, at], log_decay[1:, at], parts)
        assert torch.equal(part, whole[1:, at])
    assert torch.equal(parts, last[1:])


@HALF
def test_gated_norm_equals_the_reference(dtype, limit):
    torch.manual_seed(0)
    plain = GatedNorm(20, 1e-6)
    plain.weight = torch.nn.Parameter(torch.randn(20).to(dtype), requires_grad=False)
    x, z = torch.randn(2, 3, 6, 20), (4 * torch.randn(2, 3, 6, 20)).to(dtype)
    actual = CpuGatedNorm(plain.weight, 1e-6, COMPILED)(x, z)
    assert actual.dtype == dtype
    assert distance(actual, plain.double()(x.double(), z.double())) < limit


@HALF
@pytest.mark.parametrize("seq", [1, 5, FEW])
@pytest.mark.parametrize("shared", [True, False])
def test_experts_equal_the_reference(seq, shared, dtype, limit):
    torch.manual_seed(0)
    plain = ExpertLinear(7, 64, 40)
    plain.weight = torch.nn.Parameter(torch.randn(7, 40, 64).to(dtype), requires_grad=False)
    x, ids = torch.randn(1, seq, 1 if shared else 3, 64).to(dtype), torch.rand(1, seq, 7).argsort(-1)[..., :3]
    kernel = CpuExperts(CpuLinear(plain.weight.flatten(0, 1), None, COMPILED), 7, COMPILED)
    assert distance(kernel(x, ids), plain.double()(x.double(), ids)) < limit


@pytest.mark.parametrize("kind", CPU_BLOCK_TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("seq", [1, FEW])
def test_packed_experts_equal_the_reference(seq, kind):
    torch.manual_seed(0)
    fields = random_fields((5 * 24, 512), kind, torch.device("cpu"))
    x, ids = torch.randn(1, seq, 1, 512), torch.rand(1, seq, 5).argsort(-1)[..., :2]
    actual = CpuExperts(CpuQuantisedLinear(fields, kind, None, COMPILED), 5, COMPILED)(x, ids)
    assert distance(actual, QuantisedExperts(fields, kind, 5)(x, ids).double()) < 1e-6


def test_an_expert_that_does_not_exist_is_refused():
    fields = random_fields((5 * 24, 512), GGMLType.Q8_0, torch.device("cpu"))
    kernel = CpuExperts(CpuQuantisedLinear(fields, GGMLType.Q8_0, None, COMPILED), 5, COMPILED)
    with refuses(IndexError, where="experts", expected=(0, 4), got="[[[5]]]"):
        kernel(torch.randn(1, 1, 1, 512), torch.tensor([[[5]]]))
