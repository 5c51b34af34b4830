from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.table_matrices import table_matrix
from helpers.ggml_kernels import NEEDS_GGML
from helpers.refusals import refuses

from llorch.files.matrix import Matrix
from llorch.files.packed import TILE, Packed
from llorch.files.quant import ACTIVATION_TYPE, BLOCK_SIZES, GGMLType, decode
from llorch.files.tensor_names import undo_interleave
from llorch.judging.expectations.quantised_models import matrix_bytes
from llorch.ops.compiled.library import library
from llorch.ops.compiled.products import FEW, CompiledMatrix
from llorch.ops.linear import linear
from llorch.ops.numerics import EXACT, GGML, Numerics
from llorch.ops.rounding import block_sums, round_activations
from llorch.ops.scheme_rounding import SchemeRounding, round_as_scheme

SHAPE = (96, 512)
ROUNDING = [GGMLType.F16, GGMLType.BF16, GGMLType.Q4_0, GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.IQ4_XS]


def packed(kind: GGMLType, shape: tuple[int, int] = SHAPE) -> Packed:
    return Packed("blk.0.attn_q.weight", Path("m.gguf"), matrix_bytes(kind, shape, key=kind.name), kind, shape)


def activations(width: int = SHAPE[1], dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 1, (5, width)).astype(dtype)


def matrix(kind: GGMLType, *, resident: bool, heads: int = 0, round_inputs: bool = True) -> Matrix:
    stored = packed(kind)
    array = stored.decode()
    decoded = undo_interleave(array, heads) if heads else array
    return Matrix(stored, round_inputs=round_inputs, decoded=decoded if resident else None, interleaved_heads=heads)


def agree(actual: np.ndarray, expected: np.ndarray, *, within: float = 2e-6) -> None:
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= within * np.abs(expected).max()


@pytest.mark.parametrize("resident", [True, False], ids=["decoded", "packed"])
@pytest.mark.parametrize("kind", ROUNDING, ids=lambda kind: kind.name)
def test_inputs_are_rounded_to_what_the_type_asks_for(kind: GGMLType, resident: bool):
    x, decoded = activations(), decode(packed(kind).raw, kind, SHAPE)
    actual = matrix(kind, resident=resident).forward(x)
    agree(actual, round_activations(x, ACTIVATION_TYPE[kind]) @ decoded.T)
    assert np.abs(actual - x @ decoded.T).max() > 1e-4 * np.abs(actual).max()  # the rounding shows


@pytest.mark.parametrize("resident", [True, False], ids=["decoded", "packed"])
def test_without_rounding_a_matrix_is_what_its_blocks_mean(resident: bool):
    x = activations(dtype=np.float64)
    made = matrix(GGMLType.Q6_K, resident=resident, round_inputs=False)
    agree(made.forward(x), x @ made.dequantize().astype(np.float64).T, within=1e-14)
    assert made.activations == "F32"


@pytest.mark.parametrize(("dtype", "within"), [(np.float32, 2e-6), (np.float64, 1e-13)])
@pytest.mark.parametrize("resident", [True, False], ids=["decoded", "packed"])
@pytest.mark.parametrize("kind", [GGMLType.Q4_1, GGMLType.Q5_1], ids=lambda kind: kind.name)
def test_minima_are_multiplied_with_the_rounded_sum_of_a_block(
    kind: GGMLType, resident: bool, dtype: type, within: float
):
    x = activations(dtype=dtype)
    made = matrix(kind, resident=resident, heads=3)
    blocks = made.dequantize().reshape(SHAPE[0], -1, 32)
    minima = undo_interleave(packed(kind).raw.reshape(SHAPE[0], -1, BLOCK_SIZES[kind][1])[..., 2:4].copy(), 3)
    m = minima.view("<f2")[..., 0].astype(np.float64)
    codes = (blocks - m[..., None]).reshape(SHAPE)
    expected = round_activations(x, "Q8_1").astype(np.float64) @ codes.T + block_sums(x).astype(np.float64) @ m.T
    agree(made.forward(x), expected, within=within)
    assert np.abs(made.forward(x) - round_activations(x, "Q8_1") @ made.dequantize().T).max() > 1e-5


@pytest.mark.parametrize("kind", [GGMLType.Q8_0, GGMLType.Q5_1], ids=lambda kind: kind.name)
def test_rows_of_heads_come_out_in_the_order_of_hugging_face(kind: GGMLType):
    x = activations()
    made = [matrix(kind, resident=resident, heads=3) for resident in (True, False)]
    agree(made[1].forward(x), made[0].forward(x))
    np.testing.assert_array_equal(made[1].dequantize(), made[0].dequantize())
    assert np.abs(made[0].forward(x) - matrix(kind, resident=True).forward(x)).max() > 0.1


def test_a_matrix_of_several_tiles_is_the_same_as_one_in_one_piece():
    stored = packed(GGMLType.Q4_0, (3 * TILE // 512 + 7, 512))
    x = activations()
    whole = Matrix(stored, round_inputs=True, decoded=stored.decode())
    agree(Matrix(stored, round_inputs=True).forward(x), whole.forward(x))
    assert [start for start, _ in stored.tiles()] == [0, TILE // 512, 2 * TILE // 512, 3 * TILE // 512]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("resident", [True, False], ids=["decoded", "packed"])
def test_rows_of_an_embedding_are_exact_and_in_the_dtype_of_the_run(resident: bool, dtype: type):
    stored = packed(GGMLType.Q4_K)
    decoded = stored.decode()
    made = Matrix(stored, dtype=dtype, round_inputs=True, decoded=decoded if resident else None)
    np.testing.assert_array_equal(made.rows(np.array([3, 90, 3])), decoded[[3, 90, 3]].astype(dtype), strict=True)


@pytest.mark.parametrize("resident", [True, False], ids=["decoded", "packed"])
@pytest.mark.parametrize("kind", [GGMLType.Q8_0, GGMLType.Q5_1], ids=lambda kind: kind.name)
def test_a_product_keeps_the_dtype_of_its_input(kind: GGMLType, resident: bool):
    made = matrix(kind, resident=resident)
    assert made.forward(activations()).dtype == np.float32
    assert made.forward(activations(dtype=np.float64)).dtype == np.float64
    assert linear(activations(dtype=np.float64), made).dtype == np.float64


def test_a_row_longer_than_a_tile_is_a_tile(monkeypatch: pytest.MonkeyPatch):
    made = matrix(GGMLType.Q8_0, resident=False)
    whole = made.forward(activations())
    monkeypatch.setattr("llorch.files.packed.TILE", SHAPE[1] - 1)
    assert [len(tile) for _, tile in made.packed.tiles()] == [1] * SHAPE[0]
    agree(made.forward(activations()), whole)


@pytest.mark.parametrize("resident", [True, False], ids=["decoded", "packed"])
def test_a_matrix_takes_the_bytes_of_its_file(resident: bool):
    assert matrix(GGMLType.Q8_0, resident=resident).n_bytes == SHAPE[0] * SHAPE[1] // 32 * 34


def broken(kind: GGMLType, at_row: int, scale: bytes) -> Packed:
    sound = packed(kind)
    raw = sound.raw.copy().reshape(SHAPE[0], -1, BLOCK_SIZES[kind][1])
    raw[at_row, 2, :2] = np.frombuffer(scale, np.uint8)
    return replace(sound, raw=raw.reshape(-1))


@pytest.mark.parametrize("scale", [b"\x00\x7e", b"\x00\x7c"], ids=["nan", "inf"])
def test_a_bad_block_scale_of_a_packed_matrix_is_found_when_it_is_used(scale: bytes):
    made = Matrix(broken(GGMLType.Q8_0, 40, scale), round_inputs=True)
    with refuses("NonFinite", "(40, 64)", where="blk.0.attn_q.weight"):
        made.forward(activations())
    with refuses("NonFinite", "(40, 64)", where="blk.0.attn_q.weight"):
        made.rows(np.array([1, 40]))


def test_one_infinite_weight_of_a_packed_matrix_is_found_where_it_is_in_a_later_tile(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.files.packed.TILE", 7 * SHAPE[1])
    stored = packed(GGMLType.F16)
    values = stored.raw.copy().view("<f2").reshape(SHAPE)
    values[40, 3] = -np.inf
    made = Matrix(replace(stored, raw=values.reshape(-1).view(np.uint8)), round_inputs=True)
    with refuses("NonFinite", "-inf", "(40, 3)", where="blk.0.attn_q.weight"):
        made.forward(activations())


@pytest.mark.parametrize("resident", [True, False], ids=["decoded", "packed"])
def test_a_scale_that_means_nan_in_its_own_format_is_found_at_once(resident: bool):
    sound = packed(GGMLType.MXFP4)
    raw = sound.raw.copy()
    raw.reshape(SHAPE[0], -1)[5, 17] = 0xFF  # the first byte of the second block
    with refuses("NonFinite", "NaN", "row 5", where="blk.0.attn_q.weight"):
        Matrix(replace(sound, raw=raw), round_inputs=True, decoded=sound.decode() if resident else None)


LARGE = "MLX 4", 512, 256  # elements enough for a product in C


def calls_of(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """The number of rows of each call of a method of `CompiledMatrix`."""
    if library() is None:
        pytest.skip("NOT RUN: no C compiler")
    calls: list[int] = []
    method = getattr(CompiledMatrix, name)

    def counted(self: CompiledMatrix, *arguments: Any) -> Any:
        calls.append(len(arguments[-1]))
        return method(self, *arguments)

    monkeypatch.setattr(CompiledMatrix, name, counted)
    return calls


@pytest.mark.parametrize("scheme", [None, SchemeRounding("int8", "dynamic")], ids=str)
def test_few_rows_are_multiplied_in_c_and_more_by_tiles_decoded_in_c(scheme, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.files.packed.TILE", 200 * LARGE[2])
    multiplied, decoded = (calls_of(monkeypatch, name) for name in ("multiply", "decode_into"))
    stored = table_matrix(*LARGE)
    matrix, x = Matrix(stored, round_inputs=False, scheme=scheme), np.tile(activations(LARGE[2]), (2, 1))
    rounded = x if scheme is None else round_as_scheme(x, scheme)
    expected = rounded.astype(np.float64) @ stored.decode().astype(np.float64).T
    agree(matrix.forward(x[:FEW]), expected[:FEW], within=1e-6)
    assert (multiplied, decoded) == ([FEW], [])
    agree(matrix.forward(x[: FEW + 1]), expected[: FEW + 1], within=1e-6)
    assert (multiplied, decoded) == ([FEW], [200, 200, 112])
    assert scheme is None or np.abs(expected - x @ stored.decode().T).max() > 1e-3


def test_rows_of_a_quantised_embedding_are_decoded_in_c_to_the_same_bits(monkeypatch: pytest.MonkeyPatch):
    decoded, stored, ids = calls_of(monkeypatch, "decode_into"), table_matrix(*LARGE), np.array([3, 511, 3])
    matrix = Matrix(stored, round_inputs=False)
    np.testing.assert_array_equal(matrix.rows(ids), stored.decode_rows(ids), strict=True)
    assert decoded == [1, 1, 1]
    with pytest.raises(IndexError):
        matrix.rows(np.array([512]))


@pytest.mark.parametrize("rows", [1, FEW + 1])
def test_code_of_nan_is_found_when_the_matrix_is_used(rows: int):
    stored = table_matrix("FP8", *LARGE[1:])
    stored.raw[300 * LARGE[2] + 7] = 127
    with refuses("NonFinite", "(300, 7)", where="w"):
        Matrix(stored, round_inputs=False).forward(np.ones((rows, LARGE[2]), np.float32))


def test_float64_and_small_matrices_are_decoded_in_numpy(monkeypatch: pytest.MonkeyPatch):
    calls = [calls_of(monkeypatch, name) for name in ("multiply", "decode_into")]
    stored, small = table_matrix(*LARGE), table_matrix("MLX 4", 64, 256)
    x = activations(LARGE[2], np.float64)
    matrix = Matrix(stored, round_inputs=False, dtype=np.float64)
    agree(matrix.forward(x), x @ stored.decode().astype(np.float64).T, within=1e-14)
    x = x.astype(np.float32)
    expected = (x.astype(np.float64) @ small.decode().astype(np.float64).T).astype(np.float32)
    np.testing.assert_array_equal(Matrix(small, round_inputs=False).forward(x), expected)
    assert calls == [[], []]


def test_numerics_say_what_they_are():
    assert (str(EXACT), str(GGML)) == ("exact", "ggml")
    assert str(Numerics("ggml", "f16")) == "ggml with a f16 cache"
    assert Numerics("ggml", "f16").cache_dtype(np.float64) is np.float16
    assert GGML.cache_dtype(np.float64) is np.float64
    assert [one.rounds_activations for one in (EXACT, GGML, Numerics("exact", "f16"))] == [False, True, False]


@NEEDS_GGML
@pytest.mark.parametrize("heads", [0, 3])
@pytest.mark.parametrize("kind", [k for k in ACTIVATION_TYPE if k is not GGMLType.F32], ids=lambda kind: kind.name)
def test_ggml_s_kernels_compute_the_product_of_llorch_s_own_form(kind: GGMLType, heads: int):
    x, own = activations(), matrix(kind, resident=True, heads=heads)
    for decoded in (None, own.dequantize()):
        by_ggml = Matrix(packed(kind), round_inputs=True, decoded=decoded, interleaved_heads=heads, kernels="ggml")
        product = by_ggml.forward(x)
        agree(product, own.forward(x.astype(np.float64)), within=1e-6)
        assert product.dtype == np.float32
        assert not np.array_equal(product, own.forward(x))  # computed by ggml
        np.testing.assert_array_equal(by_ggml.forward(x.astype(np.float64)), own.forward(x.astype(np.float64)))


@NEEDS_GGML
def test_ggml_s_kernels_take_inputs_in_the_column_order_of_the_file():
    x, columns = activations(), np.random.default_rng(3).permutation(SHAPE[1])
    own, by_ggml = (
        Matrix(packed(GGMLType.Q4_K), round_inputs=True, columns=columns, kernels=kernels)
        for kernels in ("own", "ggml")
    )
    agree(by_ggml.forward(x), own.forward(x))
    assert np.abs(by_ggml.forward(x[:, ::-1]) - own.forward(x)).max() > 0.1


@NEEDS_GGML
@pytest.mark.parametrize("scale", [b"\x00\x7e", b"\x00\x7c"], ids=["nan", "inf"])
def test_a_bad_block_scale_is_found_when_ggml_s_kernels_use_it(scale: bytes):
    by_ggml = Matrix(broken(GGMLType.Q8_0, 40, scale), round_inputs=True, kernels="ggml")
    with refuses("NonFinite", "(40, 64)", where="blk.0.attn_q.weight"):
        by_ggml.forward(activations())
