import ctypes
import json
import platform
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from helpers.ggml_library import from_float_of_cpu, load_ggml

from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.ops import attention
from llorch.ops.embedding import embedding, embedding_backward
from llorch.ops.linear import linear, linear_backward
from llorch.ops.precision import WIDE_LIMIT, widen
from llorch.ops.rms_norm import rms_norm, rms_norm_backward
from llorch.ops.rope import rope, rope_backward
from llorch.ops.rounding import (
    HOST_VARIANT,
    VARIANTS,
    BlockKind,
    VariantName,
    block_sums,
    quantize_blocks,
    round_activations,
)
from llorch.ops.scheme_rounding import CODES, SchemeRounding, round_as_scheme, to_e2m1, to_e4m3
from llorch.ops.swiglu import swiglu, swiglu_backward

BLOCKS = {"Q8_0": 32, "Q8_1": 32, "Q8_K": 256}


def float32(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


def block_of(*values: float, width: int = 32) -> np.ndarray:
    return np.pad(float32(*values), ((0, 0), (0, width - len(values))))


def rows_of_all_scales(width: int, count: int = 2000) -> np.ndarray:
    """Random rows from the smallest denormal to the largest float32, most of them near 1."""
    rng = np.random.default_rng(width)
    exponents = np.concatenate([rng.uniform(-149, 127, count // 2), rng.uniform(-20, 10, count // 2)])
    rows = rng.standard_normal((len(exponents), width)).clip(-1.9, 1.9) * 2.0 ** exponents[:, None]
    return rows.astype(np.float32)


def rows_near_halves(width: int, count: int = 2000) -> np.ndarray:
    """Rows whose codes lie within a rounding error of a half, so that the last bit of the factor decides."""
    rng = np.random.default_rng(width)
    halves = rng.integers(-127, 127, (count, width)) + 0.5
    halves[:, 0] = 127
    return (halves / 127 * rng.uniform(0.001, 100, (count, 1))).astype(np.float32)


def edge_rows(width: int) -> np.ndarray:
    """Blocks of zeros, exact halves, ties for the maximum, outliers, and scales that leave float16 either way."""
    rng = np.random.default_rng(0)
    rows = [np.zeros(width), np.full(width, -0.0), np.eye(1, width)[0] * -3e4, np.eye(1, width, 5)[0] * 1e-38]
    for power in (-149, -148, -140, -133, -130, -127, -126, -125, -31, -25, -24, -15, -14, -1, 0, 3, 15, 16, 17, 100):
        halves = rng.integers(-254, 255, width) / 2.0
        halves[rng.permutation(width)[:2]] = (127, -127) if power % 2 else (-127, 127)  # a tie with both signs
        rows += [np.ldexp(halves, power), np.ldexp(halves / 127, power), np.ldexp(rng.uniform(-1, 1, width), power)]
    outlier = rng.standard_normal(width)
    outlier[3] = 1e6
    return np.array([*rows, outlier]).clip(-3.4e38, 3.4e38).astype(np.float32)


def quantise_rows(function, rows: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and Q8_1 sums (else empty) that a C function makes of rows."""
    size, block_bytes = BLOCK_SIZES[GGMLType[kind]]
    raw = np.zeros((rows.size // size, block_bytes), np.uint8)
    function(rows.ctypes.data, raw.ctypes.data, rows.size)
    head = 4 if kind == "Q8_K" else 2
    scales = raw[:, :head].copy().view(np.float32 if kind == "Q8_K" else np.float16)
    sums = raw[:, 2:4].copy().view(np.float16) if kind == "Q8_1" else raw[:, :0]
    start = 4 if kind == "Q8_1" else head
    return raw[:, start : start + size].view(np.int8), scales, sums


def assert_bytes_equal(function, rows: np.ndarray, kind: BlockKind, variant: VariantName) -> None:
    codes, scales, sums = quantise_rows(function, rows, kind)
    got_codes, got_scales = quantize_blocks(rows, kind, variant)
    np.testing.assert_array_equal(got_codes.reshape(codes.shape), codes)
    assert got_scales.tobytes() == scales.tobytes()
    if kind == "Q8_1":
        assert block_sums(rows, variant).astype(np.float16).tobytes() == sums.tobytes()


def test_a_block_of_32_worked_by_hand():
    codes, scales = quantize_blocks(block_of(254, -1, 3, 5.1, 0.9), "Q8_0", "x86")
    assert scales.tolist() == [[2.0]]
    assert codes[0, :6].tolist() == [127, 0, 2, 3, 0, 0]  # -0.5 and 1.5 go to even
    assert round_activations(block_of(254, -1, 3, 5.1, 0.9), "Q8_0", "x86")[0, :6].tolist() == [254, 0, 4, 6, 0, 0]


def test_generic_builds_round_halves_away_from_zero():
    codes, _ = quantize_blocks(block_of(254, -1, 3, -5, 0.99999994), "Q8_0", "generic")
    assert codes[0, :6].tolist() == [127, -1, 2, -3, 0, 0]


def test_the_product_uses_the_scale_as_float16_keeps_it():
    x = block_of(1.0)
    assert round_activations(x, "Q8_0")[0, 0] == np.float32(np.float16(np.float32(1) / 127)) * 127 != 1


def test_the_sum_uses_the_scale_before_it_is_stored():
    x = block_of(67, 67, 67)
    assert block_sums(x).tolist() == [[201.0]]
    assert np.float16(round_activations(x, "Q8_1").sum()) == np.float16(200.875)  # with the stored scale


def test_a_block_of_256_takes_its_sign_from_the_first_largest_value():
    for first, second in ((127, -127), (-127, 127)):
        codes, scales = quantize_blocks(block_of(1, first, second, 2.5, width=256), "Q8_K")
        sign = -1 if first > 0 else 1
        assert scales.tolist() == [[float(sign)]]
        assert codes[0, :4].tolist() == [sign, -127, 127, sign * 2]


def test_zeros_stay_zeros():
    for kind in ("F16", "BF16", "Q8_0", "Q8_1", "Q8_K"):
        assert not round_activations(np.zeros((3, 256), np.float32), kind).any()


def test_float16_and_bfloat16_ties_go_to_even():
    assert round_activations(float32(1 + 2**-11, 1 + 3 * 2**-11, -(2**-25), 2**-24), "F16").tolist() == [
        [1.0, 1 + 2**-9, 0.0, 2**-24]
    ]
    assert round_activations(float32(1 + 2**-8, 1 + 3 * 2**-8, -1.004), "BF16").tolist() == [
        [1.0, 1 + 2**-6, -1.0078125]
    ]


@pytest.mark.parametrize(
    ("x", "expected"), [(65504, 65504), (65519.996, 65504), (65520, np.inf), (65535.996, np.inf), (65536, np.inf)]
)
def test_float16_overflows_from_half_a_step_beyond_its_largest_value(x: float, expected: float):
    with np.errstate(over="ignore"):
        assert round_activations(float32(x, 1.0), "F16").tolist() == [[expected, 1.0]]
        assert round_activations(float32(-x, 1.0), "F16").tolist() == [[-expected, 1.0]]


def test_float16_agrees_with_the_cast_of_numpy_on_every_exponent():
    bits = np.random.default_rng(0).integers(0, 2**32, (4, 100_000), dtype=np.uint32)
    bits[0] = (bits[0] & 0x8FFF_F000) | 0x3000_0000  # small enough for the fast path, many ties
    bits[1] = (bits[1] & 0x87FF_F000) | 0x3000_0000  # around the smallest normal and the subnormals
    bits[2] &= 0xBFFF_FFFF  # below 2
    x = bits.view(np.float32)
    x[~np.isfinite(x)] = 1
    for row in x:
        with np.errstate(over="ignore"):
            expected = row.astype(np.float16).astype(np.float32)
        assert round_activations(row[None], "F16").tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q8_1", "Q8_K"])
def test_float64_is_rounded_to_float32_first_and_keeps_its_dtype(kind):
    x = np.random.default_rng(0).standard_normal((2, 3, 256))
    rounded = round_activations(x, kind)
    assert rounded.dtype == np.float64
    np.testing.assert_array_equal(rounded.astype(np.float32), round_activations(x.astype(np.float32), kind))


def test_in_float64_the_product_of_code_and_scale_is_exact():
    x = np.random.default_rng(0).standard_normal((2, 512))
    codes, scales = quantize_blocks(x, "Q8_K")
    expected = codes.reshape(2, 2, 256) * scales.astype(np.float64)[:, :, None]
    np.testing.assert_array_equal(round_activations(x, "Q8_K"), expected.reshape(2, 512))


def test_float32_weights_keep_ggml_activations():
    x = np.array([[0.1, -2.5]])
    assert round_activations(x, "F32").tolist() == [[float(np.float32(0.1)), -2.5]]
    assert round_activations(x, "F32").dtype == np.float64


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_rounded_values_are_the_codes_times_the_scales(kind):
    x = edge_rows(BLOCKS[kind]).astype(np.float64)
    codes, scales = quantize_blocks(x, kind)
    with np.errstate(invalid="ignore"):
        expected = codes * scales.astype(np.float64)
    np.testing.assert_array_equal(round_activations(x, kind), expected)


def test_a_scale_beyond_float16_is_not_hidden():
    assert not np.isfinite(round_activations(block_of(1e7, 1), "Q8_0")).any()


def test_row_with_an_incomplete_block_is_an_error():
    with pytest.raises(ValueError, match="cannot reshape"):
        round_activations(np.zeros((2, 48), np.float32), "Q8_0")


def test_large_arrays_are_rounded_in_pieces_to_the_same_values():
    x = rows_of_all_scales(256)
    for kind in ("F16", "BF16", "Q8_0", "Q8_K"):
        np.testing.assert_array_equal(round_activations(x, kind)[-3:], round_activations(x[-3:], kind))


def test_the_variant_of_this_machine_is_known():
    assert (HOST_VARIANT == "generic") == (platform.machine() not in ("x86_64", "AMD64", "arm64", "aarch64"))
    assert HOST_VARIANT in VARIANTS


@pytest.mark.live
@pytest.mark.parametrize("rows", [rows_of_all_scales, rows_near_halves, edge_rows])
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_the_bytes_of_ggml_on_this_machine(kind, rows):
    assert_bytes_equal(from_float_of_cpu(GGMLType[kind]), rows(BLOCKS[kind]), kind, HOST_VARIANT)


@pytest.mark.live
@pytest.mark.parametrize("rows", [rows_of_all_scales, rows_near_halves, edge_rows])
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_of_the_generic_variant_are_the_bytes_of_the_reference_c(kind, rows):
    function = getattr(load_ggml(), f"quantize_row_{kind.lower().replace('_k', '_K')}_ref")
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    assert_bytes_equal(function, rows(BLOCKS[kind]), kind, "generic")


@pytest.mark.live
@pytest.mark.parametrize("rows", [rows_of_all_scales, edge_rows])
@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_precision_is_the_bits_of_ggml(kind, rows):
    x = rows(64)
    bits = np.empty(x.shape, np.uint16)
    from_float_of_cpu(GGMLType[kind])(x.ctypes.data, bits.ctypes.data, x.size)
    expected = (
        bits.view(np.float16).astype(np.float32) if kind == "F16" else (bits.astype(np.uint32) << 16).view(np.float32)
    )
    assert round_activations(x, kind).tobytes() == expected.tobytes()
    finite = np.isfinite(expected).all(axis=1)  # row by row: large values take another path
    assert round_activations(x[finite], kind).tobytes() == expected[finite].tobytes()


def test_variants_differ_in_the_tested_cases():
    rows = rows_near_halves(32)
    codes = {name: quantize_blocks(rows, "Q8_0", name)[0] for name in VARIANTS}
    for one, other in (("x86", "neon"), ("x86", "generic"), ("neon", "generic")):
        assert 100 < np.count_nonzero(codes[one] != codes[other]) < rows.size


GOLDENS = Path(__file__).parents[2] / "reference_outputs" / "quantised_folders"
KINDS = {
    "int8 token": SchemeRounding("int8", "dynamic"),
    "int4 token": SchemeRounding("int4", "dynamic"),
    "int8 static": SchemeRounding("int8", "static", number=0.02099609375),
    "fp8 token": SchemeRounding("E4M3", "dynamic"),
    "fp8 static": SchemeRounding("E4M3", "static", number=0.00592041015625),
    "fp8 groups of 128": SchemeRounding("E4M3", "dynamic", 128),
    "nvfp4": SchemeRounding("E2M1", "e4m3", 16, 612.3455810546875),
    "mxfp4": SchemeRounding("E2M1", "e8m0", 32),
    "mxfp8": SchemeRounding("E4M3", "e8m0", 32),
}
TORCHAO = SchemeRounding("int8", "dynamic", by_reciprocal=True)


@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", KINDS)
def test_round_as_scheme_equals_compressed_tensors_bit_for_bit(name: str, dtype: type[np.floating]):
    golden = json.loads((GOLDENS / "scheme.json").read_text())["rounded"][name]
    with np.load(GOLDENS / "scheme.npz") as arrays:
        actual = round_as_scheme(arrays["inputs"].astype(dtype), KINDS[name]) + 0  # zeros without a sign
    assert actual.dtype == dtype
    if dtype is np.float64:
        np.testing.assert_array_equal(actual.reshape(-1)[::193], golden["samples"])
    assert sha256(actual.tobytes()).hexdigest() == golden[np.dtype(dtype).name]


def test_goldens_of_scheme_rounding_cover_every_kind():
    assert json.loads((GOLDENS / "scheme.json").read_text())["rounded"].keys() == KINDS.keys()
    assert {how.codes for how in KINDS.values()} == CODES.keys()


def test_round_as_scheme_equals_torchao_bit_for_bit():
    golden = json.loads((GOLDENS / "scheme.json").read_text())["rounded_by_torchao"]
    with np.load(GOLDENS / "scheme.npz") as arrays:
        actual = round_as_scheme(arrays["inputs"].astype(np.float32), TORCHAO) + 0  # zeros without a sign
    np.testing.assert_array_equal(actual.reshape(-1)[::193], golden["samples"])
    assert sha256(actual.tobytes()).hexdigest() == golden["float32"]


def test_round_as_scheme_of_torchao_has_a_least_scale_and_multiplies_by_its_reciprocal():
    x = np.array([[1e-7, -2e-7, 0, 3e-8], [127.5, 63.5, -1, 0.5]], np.float32)
    np.testing.assert_array_equal(round_as_scheme(x, TORCHAO), [np.array([1, -2, 0, 0]) * 2.0**-23, [127, 64, -1, 0]])
    tie = np.array([[80.01, 7.2165885]], np.float32)  # x / s = 11.5 and x * (1 / s) < 11.5
    scale = tie[0, 0] / np.float32(127.5)
    assert tie[0, 1] / scale == 11.5
    assert round_as_scheme(tie, TORCHAO)[0, 1] == 11 * scale


@pytest.mark.parametrize("name", KINDS)
def test_round_as_scheme_keeps_nan_and_shape(name: str):
    x = np.ones((2, 3, 128), np.float32)
    x[1, 2, 5] = np.nan
    actual = round_as_scheme(x, KINDS[name])
    assert actual.shape == x.shape
    assert np.isnan(actual[1, 2, 5])
    assert np.isfinite(actual[0]).all()


def test_round_as_scheme_of_one_row_does_not_depend_on_other_rows():
    x = np.random.default_rng(0).normal(0, 1, (3, 128))
    for how in KINDS.values():
        np.testing.assert_array_equal(round_as_scheme(x, how)[1:2], round_as_scheme(x[1:2], how))


def test_small_floats_round_ties_to_the_even_code():
    np.testing.assert_array_equal(
        to_e2m1(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5])), [0, 1, 1, 2, 2, 4, 4, -4]
    )
    np.testing.assert_array_equal(to_e4m3(np.array([17.0, 19, 2**-10, 3 * 2**-10, 447])), [16, 20, 0, 2**-8, 448])


@pytest.mark.nightly_cases(but=["int8 static-float32"])
@pytest.mark.live
@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", KINDS)
def test_round_as_scheme_equals_compressed_tensors_run_now(name: str, dtype: type[np.floating]):
    pytest.importorskip("compressed_tensors", reason="NOT RUN: compressed_tensors is not installed")
    from reference_outputs.make_scheme import FUNCTIONS, rounded

    rng = np.random.default_rng(1)
    x = (rng.normal(0, 1, (40, 512)) * np.exp(rng.normal(0, 2, (40, 512)))).astype(dtype)
    np.testing.assert_array_equal(round_as_scheme(x, KINDS[name]), rounded(x, *FUNCTIONS[name]))


def test_small_arrays_are_all_widened():
    small, scalar = widen(np.ones(WIDE_LIMIT, np.float32), np.ones((), np.float32))
    assert small.dtype == scalar.dtype == np.float64


@pytest.mark.parametrize("large_index", [0, 1])
def test_one_large_array_keeps_all_in_their_own_dtype(large_index):
    arrays = [np.ones(3, np.float32), np.ones(3, np.float32)]
    arrays[large_index] = np.ones(WIDE_LIMIT + 1, np.float32)
    assert all(a is b for a, b in zip(widen(*arrays), arrays, strict=True))


def test_widening_is_exact_and_copies(rng):
    array = rng.normal(size=7).astype(np.float32)
    (wide,) = widen(array)
    np.testing.assert_array_equal(wide.astype(np.float32), array, strict=True)
    assert not np.shares_memory(wide, array)


def test_float64_arrays_are_handed_back_as_they_are():
    array = np.ones(3)
    assert widen(array)[0] is array


@pytest.mark.usefixtures("arithmetic")
def test_every_op_keeps_the_dtype_and_does_not_change_its_inputs(rng, dtype):
    def some(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(dtype)

    q, k, v, scores, probs, x, y, gain = (
        some(*shape) for shape in ((5, 6, 4), (2, 5, 4), (2, 5, 4), (6, 5, 5), (6, 5, 5), (5, 24), (5, 24), (24,))
    )
    ids, weight, tables = np.array([4, 0, 4, 1, 2]), some(3, 24), np.ones((2, 5, 2))
    for op, *inputs in (
        (attention.attention_scores, q, k),
        (attention.attention_probs, scores),
        (attention.attention_context, probs, v),
        (attention.attention_scores_backward, scores, q, k),
        (attention.attention_probs_backward, scores, probs),
        (attention.attention_context_backward, x, probs, v),
        (embedding, ids, y),
        (partial(embedding_backward, vocab_size=9), x, ids),
        (linear, x, weight),
        (linear, x, weight, some(3)),
        (linear_backward, x, some(24, 3)),
        (partial(rms_norm, eps=1e-6), x, gain),
        (partial(rms_norm_backward, eps=1e-6), x, y, gain),
        (rope, q, *tables),
        (rope_backward, q, *tables),
        (swiglu, x, y),
        (swiglu_backward, x, y, y),
    ):
        before = [array.copy() for array in inputs]
        made = op(*inputs)
        for array in made if isinstance(made, tuple) else (made,):
            assert array.dtype == dtype, op
            assert not any(np.shares_memory(array, one) for one in inputs), op
        for array, old in zip(inputs, before, strict=True):
            np.testing.assert_array_equal(array, old)
