"""Blocks that ggml's quantisers write pass, and every change of a block, a row or a scale is seen."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.ggml_library import load_ggml

from llorch.files.packed import Packed, Scheme, has_codes
from llorch.files.quant import BLOCK_SIZES, LARGEST, GGMLType, decode, encode, encoded_size
from llorch.files.quantised.matrix import QuantisedMatrix, Recipe, StoredPart, floats_of
from llorch.judging.expectations.quantised_models import random_blocks
from llorch.judging.source.grids import GRIDS, BlockReport, judge_blocks

WIDTH, N_ROWS = 512, 24
_WITH_TABLES = "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S"
WITHOUT_GRID = [GGMLType[name] for name in f"{_WITH_TABLES} Q1_0 Q2_0".split()]
NEED_IMPORTANCES = {GGMLType[name] for name in ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS")}
OF_ACTIVATIONS = {GGMLType.Q8_1, GGMLType.Q8_K}  # files have no weights in them
# ggml computes tables of neighbours for seconds.
SLOW_TABLES = ("IQ1_S*", "IQ1_M*", "IQ2_XS*", "IQ2_S*", "IQ2_XXS*")
BY_LLORCH = [kind for kind in LARGEST if has_codes(kind)]

Draw = Callable[[np.random.Generator], np.ndarray]

VALUES: dict[str, Draw] = {
    "normal": lambda rng: rng.normal(size=(N_ROWS, WIDTH)) * 0.03,
    "laplace": lambda rng: rng.laplace(size=(N_ROWS, WIDTH)) * 0.03,
    "t3": lambda rng: rng.standard_t(3, size=(N_ROWS, WIDTH)) * 0.02,
    "offset": lambda rng: rng.normal(size=(N_ROWS, WIDTH)) * 0.001 + 1,
    "tiny": lambda rng: rng.normal(size=(N_ROWS, WIDTH)) * 3e-6,  # the scales are subnormal
    "rows and columns of many sizes": lambda rng: (
        0.02 * rng.normal(size=(N_ROWS, WIDTH)) * np.exp(2 * rng.normal(size=(N_ROWS, 1)) + rng.normal(size=WIDTH))
    ),
}
IMPORTANCES: dict[str, Draw | None] = {
    "none": None,
    "flat": lambda rng: np.ones(WIDTH),
    "lognormal": lambda rng: np.exp(rng.normal(size=WIDTH)),
    "spikes": lambda rng: np.where(rng.random(WIDTH) < 0.01, 1e4, 1.0),
}


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    library, pointer, count = load_ggml(), ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    return library


def quantise(ggml: ctypes.CDLL, values: np.ndarray, kind: GGMLType, importances: np.ndarray | None = None) -> Packed:
    """Quantise rows with ggml's own quantiser; `importances` has a number for each column."""
    values, weights = np.ascontiguousarray(values, np.float32), None
    if importances is not None:
        importances = importances.astype(np.float32)
        weights = importances.ctypes.data
    raw = np.zeros(encoded_size(values.shape, kind), np.uint8)
    n_bytes = ggml.ggml_quantize_chunk(kind, values.ctypes.data, raw.ctypes.data, 0, *values.shape, weights)
    assert n_bytes == raw.size
    return Packed("weight", Path("model"), raw, kind, values.shape)


def default_importances(kind: GGMLType) -> np.ndarray | None:
    return np.ones(WIDTH) if kind in NEED_IMPORTANCES else None


def judge(packed: Packed, source: np.ndarray, uncertainty: np.ndarray | float = 0.0) -> list[tuple[int, int]]:
    """Find the wrong blocks of a matrix against the values of the source."""
    return report_of(packed, source, uncertainty).all_wrong(len(source))


def report_of(packed: Packed, source: np.ndarray, uncertainty: np.ndarray | float = 0.0) -> BlockReport:
    return judge_blocks(packed, packed.decode(), source.astype(np.float32), uncertainty)


def test_every_type_with_codes_has_a_grid_or_none():
    assert {kind for kind in GGMLType if has_codes(kind)} == {*GRIDS, *WITHOUT_GRID, *OF_ACTIVATIONS}


@pytest.mark.parametrize("kind", GRIDS, ids=lambda kind: kind.name)
def test_grid_describes_the_bytes_of_a_block(kind: GGMLType):
    grid, n_values = GRIDS[kind], BLOCK_SIZES[kind][0]
    block = random_blocks(kind, 1, key="grid").reshape(1, -1)

    def decode_block(fill: int | None = None, factor: float = 1.0) -> np.ndarray:
        changed = block.copy()
        if fill is not None:
            changed[:, slice(*grid.codes)] = fill
        if grid.scale is not None:
            scale = changed[0, grid.scale : grid.scale + 2].view("<f2")
            scale[:] = factor * scale
        return decode(changed.reshape(-1), kind, (n_values,)).astype(np.float64)

    lowest, highest = (decode_block(fill) for fill in grid.fill)
    has_scale = highest != lowest
    numbers = ((decode_block() - lowest)[has_scale] / (highest - lowest)[has_scale]) * np.ptp(grid.numbers)
    numbers = np.minimum(numbers + grid.numbers[0], grid.numbers[-1])  # no quantiser writes the fourth code of TQ2_0
    nearest = grid.numbers[np.abs(numbers[:, None] - grid.numbers).argmin(axis=1)]
    np.testing.assert_allclose(numbers, nearest, atol=1e-3)
    assert len({*nearest.tolist()}) > min(len(grid.numbers) - 1, 8)
    if grid.scale is not None:
        spans = [decode_block(grid.fill[1], factor) - decode_block(grid.fill[0], factor) for factor in (1.0, 2.0)]
        np.testing.assert_allclose(spans[1], 2 * spans[0], rtol=1e-5)


def assert_no_wrong_block(packed: Packed, source: np.ndarray, case: tuple[str, ...]) -> BlockReport:
    report = report_of(packed, source)
    assert report.all_wrong(len(source)) == [], case
    assert report.n_blocks == packed.raw.size // BLOCK_SIZES[packed.ggml][1]
    return report


@pytest.mark.live
@pytest.mark.nightly_cases(*SLOW_TABLES)
@pytest.mark.parametrize("kind", [*GRIDS, *WITHOUT_GRID], ids=lambda kind: kind.name)
def test_no_block_of_ggml_s_quantiser_is_wrong(ggml: ctypes.CDLL, kind: GGMLType):
    rng = np.random.default_rng(int(kind))
    for distribution, draw in VALUES.items():
        for name, draw_importances in IMPORTANCES.items():
            if draw_importances is None and kind in NEED_IMPORTANCES:
                continue
            source = draw(rng).astype(np.float32)
            importances = None if draw_importances is None else draw_importances(rng)
            report = assert_no_wrong_block(
                quantise(ggml, source, kind, importances), source, (kind.name, distribution, name)
            )
            if name == "none":
                assert report.fitted == []


@pytest.mark.parametrize("kind", BY_LLORCH, ids=lambda kind: kind.name)
def test_no_block_of_llorch_s_encoder_is_wrong(kind: GGMLType):
    for distribution, draw in VALUES.items():
        source = draw(np.random.default_rng(int(kind))).astype(np.float32)
        assert_no_wrong_block(encode_rows(source, kind), source, (kind.name, distribution))


def encode_rows(values: np.ndarray, kind: GGMLType) -> Packed:
    """Encode rows with llorch's own encoder, whose bytes are ggml's."""
    raw = np.concatenate([part.copy() for part in encode(values, kind, name="weight", path=Path("model"))])
    return Packed("weight", Path("model"), raw, kind, values.shape)


def exchange_rows(values: np.ndarray, first: int, second: int) -> np.ndarray:
    order = np.arange(len(values))
    order[[first, second]] = second, first
    return values[order]


def change_block(packed: Packed, index: int, change: Callable[[np.ndarray], object]) -> Packed:
    """Change a block in a copy; `change` gets the bytes of this and all later blocks, (blocks, bytes)."""
    raw = packed.raw.copy()
    change(raw.reshape(-1, BLOCK_SIZES[packed.ggml][1])[index:])
    return replace(packed, raw=raw)


def zero(blocks: np.ndarray) -> None:
    blocks[0] = 0


def copy_next(blocks: np.ndarray) -> None:
    blocks[0] = blocks[1]


DAMAGES = {"zeroed": zero, "copied": copy_next}


def assert_errors_are_seen(packed: Packed, source: np.ndarray) -> None:
    """Assert that exchanged rows and damaged blocks are wrong, and no other rows and blocks."""
    per_row = packed.raw.size // BLOCK_SIZES[packed.ggml][1] // len(source)
    wrong = judge(packed, exchange_rows(source, 3, 9))
    assert {row for row, _ in wrong} == {3, 9}
    for name, damage in DAMAGES.items():
        assert judge(change_block(packed, per_row + 1, damage), source) == [(1, 1)], name


def assert_errors_of_grids_are_seen(packed: Packed, source: np.ndarray) -> None:
    """Assert that another code and a scaled matrix are wrong."""
    per_row, (first, end) = packed.raw.size // BLOCK_SIZES[packed.ggml][1] // len(source), GRIDS[packed.ggml].codes

    def flip(blocks: np.ndarray) -> None:
        blocks[0, (first + end) // 2] ^= 0x11

    assert judge(change_block(packed, per_row + 1, flip), source) == [(1, 1)]
    for factor in (0.98, 1.02):
        assert judge(packed, source / factor), factor


@pytest.mark.live
@pytest.mark.nightly_cases(*SLOW_TABLES)
@pytest.mark.parametrize("distribution", ["normal", "laplace"])
@pytest.mark.parametrize("kind", [*GRIDS, *WITHOUT_GRID], ids=lambda kind: kind.name)
def test_errors_in_blocks_of_ggml_s_quantiser_are_seen(ggml: ctypes.CDLL, kind: GGMLType, distribution: str):
    source = VALUES[distribution](np.random.default_rng(1)).astype(np.float32)
    packed = quantise(ggml, source, kind, default_importances(kind))
    assert_errors_are_seen(packed, source)
    if kind in GRIDS:
        assert_errors_of_grids_are_seen(packed, source)


@pytest.mark.parametrize("kind", BY_LLORCH, ids=lambda kind: kind.name)
def test_errors_in_blocks_of_llorch_s_encoder_are_seen(kind: GGMLType):
    source = VALUES["laplace"](np.random.default_rng(1)).astype(np.float32)
    packed = encode_rows(source, kind)
    assert_errors_are_seen(packed, source)
    assert_errors_of_grids_are_seen(packed, source)


@pytest.mark.live
@pytest.mark.parametrize("importances", ["none", "spikes"])
def test_each_exchanged_pair_of_rows_in_q4_k_is_seen(ggml: ctypes.CDLL, importances: str):
    rng = np.random.default_rng(5)
    source, draw = VALUES["normal"](rng).astype(np.float32), IMPORTANCES[importances]
    packed = quantise(ggml, source, GGMLType.Q4_K, None if draw is None else draw(rng))
    pairs = [(first, second) for first in range(N_ROWS) for second in range(first)]
    unseen = [pair for pair in pairs if {row for row, _ in judge(packed, exchange_rows(source, *pair))} != {*pair}]
    assert unseen == []


@pytest.mark.live
def test_fitted_scales_of_an_importance_matrix_are_counted_and_no_other_block(ggml: ctypes.CDLL):
    rng = np.random.default_rng(6)
    source = VALUES["t3"](rng).astype(np.float32)
    packed = quantise(ggml, source, GGMLType.Q4_0, IMPORTANCES["lognormal"](rng))  # type: ignore[misc]
    report = report_of(packed, source)
    assert report.wrong == []
    assert 0.01 < len(report.fitted) / report.n_blocks < 0.4
    damaged = report_of(change_block(packed, 40, copy_next), source)
    assert damaged.all_wrong(N_ROWS) == damaged.wrong == [divmod(40, WIDTH // 32)]


def blocks_in(n_rows: int, per_row: int, fitted: list[tuple[int, int]], wrong: list[tuple[int, int]]) -> BlockReport:
    return BlockReport(n_rows * per_row, wrong, fitted, n_wrong=len(wrong), n_fitted=len(fitted))


def test_fitted_scales_are_wrong_if_too_few_too_many_or_all_in_a_row():
    some = [(row, row % 50) for row in range(100)]
    damaged = [(7, 3)]
    assert blocks_in(100, 50, some, damaged).all_wrong(100) == damaged
    assert blocks_in(1000, 50, some[:4], damaged).all_wrong(1000) == sorted(some[:4] + damaged)
    many = [(row, block) for row in range(100) for block in range(21)]
    assert blocks_in(100, 50, many, damaged).all_wrong(100) == sorted(many + damaged)
    row = [(99, block) for block in range(38)]
    assert blocks_in(100, 50, some[:99] + row, damaged).all_wrong(100) == damaged + row


def test_reports_of_parts_add_up_with_the_rows_of_the_whole():
    source = VALUES["normal"](np.random.default_rng(2)).astype(np.float32)
    packed = change_block(encode_rows(source, GGMLType.Q8_0), 5 * 16 + 2, copy_next)
    whole, sum_of_parts = report_of(packed, source), BlockReport()
    for rows in np.split(np.random.default_rng(3).permutation(N_ROWS), 3):
        sum_of_parts.add(report_of(packed.picked(rows), source[rows]), rows)
    assert sum_of_parts.wrong == whole.wrong == [(5, 2)]
    assert sum_of_parts.n_blocks == whole.n_blocks
    squares = np.square(source, dtype=np.float64).sum(), np.square(packed.decode() - source, dtype=np.float64).sum()
    np.testing.assert_allclose([whole.signal, whole.error], squares, rtol=1e-5)
    np.testing.assert_allclose([sum_of_parts.signal, sum_of_parts.error], squares, rtol=1e-5)


def test_part_of_a_report_gets_the_rows_of_the_whole():
    report = BlockReport(8, [(0, 0)])
    report.add(BlockReport(4, [(0, 1)], [(1, 0), (0, 0)], 1, 0.5, 2.0), np.array([7, 3]))
    assert report == BlockReport(12, [(0, 0), (7, 1)], [(3, 0), (7, 0)], 1, 0.5, 2.0)


def test_report_lists_the_first_wrong_blocks_and_counts_all():
    report, blocks = BlockReport(), [(row, 0) for row in range(1 << 15)]
    for _ in range(3):
        report.add(BlockReport(1 << 15, blocks, n_wrong=1 << 15), np.arange(1 << 15))
    assert (len(report.wrong), report.n_wrong) == (1 << 16, 3 << 15)


def test_values_within_the_uncertainty_pass_and_values_beyond_it_fail():
    rng = np.random.default_rng(4)
    source = VALUES["normal"](rng).astype(np.float32)
    packed = encode_rows(source, GGMLType.Q8_0)
    shift = np.where(rng.random(source.shape) < 0.5, -1e-3, 1e-3)
    assert judge(packed, source + shift, 1e-3) == judge(packed, source + shift, np.full(source.shape, 1e-3)) == []
    assert judge(packed, source + shift, 1e-4)
    assert judge(packed, source + shift)


def test_values_below_the_smallest_scale_may_become_zeros():
    source = np.full((1, 32), 2.0**-24, np.float32)
    zeros = Packed("weight", Path("model"), np.zeros(34, np.uint8), GGMLType.Q8_0, (1, 32))
    assert judge(zeros, source) == []
    assert judge(zeros, source * 2**12) == [(0, 0)]


def test_block_with_all_codes_at_the_ends_of_a_small_scale_is_wrong():
    source = VALUES["normal"](np.random.default_rng(2)).astype(np.float32)
    packed = encode_rows(source, GGMLType.Q8_0)

    def shrink(blocks: np.ndarray) -> None:
        blocks[0, :2] = np.array([1e-6], "<f2").view(np.uint8)
        blocks[0, 2:] = np.where(source[1, 32:64] < 0, -127, 127).astype(np.int8).view(np.uint8)

    assert judge(change_block(packed, WIDTH // 32 + 1, shrink), source) == [(1, 1)]


GROUP = 32


def gptq_matrix(codes: np.ndarray, scales: np.ndarray, scheme: str = "GPTQ 4-bit") -> QuantisedMatrix:
    """Make a matrix with codes around 8, and a float16 scale for each row and group."""
    arrays = {"codes": codes.astype(np.uint8), "scales": scales.astype(np.float16)}
    dtypes = {"codes": "U8", "scales": "F16"}
    parts = {
        name: StoredPart(name, dtypes[name], array.shape, array.view(np.uint8).reshape(-1))
        for name, array in arrays.items()
    }
    recipe = Recipe(
        codes=lambda parts, rows: parts["codes"].array[rows], values=np.arange(16, dtype=np.float32) - 8,
        scale=floats_of("scales"), group=GROUP,
    )  # fmt: skip
    return QuantisedMatrix("weight", Path("model"), parts["codes"].raw, Scheme(scheme), codes.shape, parts, recipe)


def round_to_codes(weight: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(weight / np.repeat(scales, GROUP, axis=1)) + 8, 0, 15)


def compensate(weight: np.ndarray, scales: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    """Choose codes column by column, and move each column's rounding error to the next columns (arXiv:2210.17323)."""
    hessian = inputs.T @ inputs
    hessian += 0.01 * np.diag(hessian).mean() * np.eye(len(hessian))
    inverse = np.linalg.cholesky(np.linalg.inv(hessian)).T
    rest, codes = weight.astype(np.float64), np.zeros(weight.shape)
    for column in range(weight.shape[1]):
        scale = scales[:, column // GROUP]
        codes[:, column] = np.clip(np.rint(rest[:, column] / scale) + 8, 0, 15)
        error = (rest[:, column] - scale * (codes[:, column] - 8)) / inverse[column, column]
        rest[:, column + 1 :] -= error[:, None] * inverse[column, column + 1 :]
    return codes


@pytest.fixture(scope="module")
def simulated() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights, scales, and codes that compensate for rounding on correlated inputs."""
    rng = np.random.default_rng(7)
    weight = (rng.normal(size=(32, 768)) * 0.03).astype(np.float32)
    scales = 2 * np.abs(weight).reshape(32, -1, GROUP).max(2) / 15
    scales = scales.astype(np.float16).astype(np.float64)
    inputs = rng.normal(size=(1000, 32)) @ rng.normal(size=(32, 768)) * 0.3 + rng.normal(size=(1000, 768))
    return weight, scales, compensate(weight, scales, inputs)


Simulated = tuple[np.ndarray, np.ndarray, np.ndarray]


@pytest.mark.parametrize("scheme", ["GPTQ 4-bit", "AWQ 4-bit", "compressed-tensors 4-bit"])
def test_compensation_for_rounding_passes_and_is_counted(simulated: Simulated, scheme: str):
    weight, scales, codes = simulated
    report = report_of(gptq_matrix(codes, scales, scheme), weight)
    assert (report.wrong, report.n_compensated) == ([], len(weight))
    nearest = report_of(gptq_matrix(round_to_codes(weight, scales), scales, scheme), weight)
    assert (nearest.wrong, nearest.n_compensated) == ([], 0)


def test_compensation_is_wrong_in_a_format_whose_quantisers_do_not_compensate(simulated: Simulated):
    weight, scales, codes = simulated
    report = report_of(gptq_matrix(codes, scales, "MLX 4-bit"), weight)
    assert ({row for row, _ in report.wrong}, report.n_compensated) == ({*range(len(weight))}, 0)


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_scales_off_by_ten_percent_are_no_compensation(simulated: Simulated, factor: float):
    weight, scales, codes = simulated
    scales = scales.copy()
    scales[4:8] *= factor
    assert {row for row, _ in judge(gptq_matrix(codes, scales), weight)} == {4, 5, 6, 7}


def test_other_changes_of_codes_are_no_compensation(simulated: Simulated):
    weight, scales, _ = simulated
    nearest = round_to_codes(weight, scales)
    few, large = nearest.copy(), nearest.copy()
    few[3, 64:70] += np.where(few[3, 64:70] > 8, -1, 1)  # 1 % of the row
    is_inside = (nearest[5] >= 2) & (nearest[5] <= 13)
    large[5, is_inside] += np.where(np.random.default_rng(8).random(is_inside.sum()) < 0.5, -2, 2)
    assert judge(gptq_matrix(few, scales), weight) == [(3, 2)]
    assert {row for row, _ in judge(gptq_matrix(large, scales), weight)} == {5}
    assert {row for row, _ in judge(gptq_matrix(nearest, scales), exchange_rows(weight, 1, 2))} == {1, 2}
