"""Judge quantised values block by block against what their type can do to the values that they were made from.

A block of a quantised tensor has a grid: the numbers that its scale and minimum allow. Every quantiser chooses the
nearest number of the grid, in all types of `GRIDS` and in quantised folders, with or without an importance matrix.
Therefore the grid of the file and the values of the source determine every code. Three cases need more:

    fitted scales   Q4_0, Q4_1, Q5_0 and Q5_1 with an importance matrix: the scale is fitted after the codes are chosen
    compensation    GPTQ and its relatives move later codes, to make up for the rounding of earlier ones
    no grid         IQ1, IQ2 and IQ3 choose several numbers at once from a table; only their errors are limited

Source: ggml src/ggml-quants.c, `quantize_*`; limits are twice the largest error that ggml's quantisers make of normal,
Laplace and t-distributed values, with importances from none to some columns of 10,000 (`tests/judging/source`).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Bool, Float, Float32

from llorch.files.packed import Packed, Rows
from llorch.files.quant import BLOCK_SIZES, GGMLType, decode
from llorch.files.quantised.matrix import Parts, QuantisedMatrix

Values = Float32[np.ndarray, "rows width"]

_HALF = 2.0**-11  # relative rounding error of float16
_SCALE_ERRORS = {"": _HALF, "BF16": 2.0**-8, "8-bit": 2.0**-4}  # by dtype of the scales of a folder
_TINY = 2.0**-25  # absolute rounding error of a subnormal float16
_ROUNDING = 1e-3  # of the float32 arithmetic here and in quantisers, in steps of a grid
_LOST = 0.9  # relative error of a block that its codes do not represent
_LOST_AT_TWO_BITS = 1.1  # the same for types of two bits or less without zero points; unrelated values have 1.4
_COMPENSATING = ("GPTQ", "AWQ", "compressed-tensors")  # schemes whose quantisers may compensate
_UNUSED = {"BitNet": 2.0}  # numbers of codes that quantisers of a scheme do not write
_COMPENSATED = 2.5  # error of a row with compensation, relative to that of the nearest codes; 1.8 in simulations
_LEAST_MOVED = 0.05  # share of the codes of a row that compensation moves; 0.12 to 0.17 in simulations
_FEW = 1e-4  # share of blocks with fitted scales below which they are errors: without importances there are none
_MOST_LISTED = 1 << 16  # blocks of a tensor that are listed; more are only counted
_MANY, _MANY_OF_ROW = 0.4, 0.75  # shares above which another scale is the reason; with importances about 0.2


@dataclass(frozen=True)
class Grid:
    """Codes of a ggml type: the bytes of a block that hold them, and the numbers that they stand for.

    Attributes:
        codes: First byte of the codes, and the first byte after them.
        fill: Values of all these bytes for the lowest and for the highest number.
        numbers: All numbers, ascending, before scale and minimum.
        scale: Byte of the float16 scale; None for a scale of 8 bits.
        smallest: Largest magnitude that the smallest scale may round to 0.
        is_fitted: True if the scale is fitted after the codes are chosen, with an importance matrix.
    """

    codes: tuple[int, int]
    fill: tuple[int, int]
    numbers: np.ndarray
    scale: int | None
    smallest: float
    is_fitted: bool = False


def _uniform(bits: int) -> np.ndarray:
    return np.arange(1 << bits, dtype=np.float32)


_TERNARY = np.arange(3, dtype=np.float32)
_E2M1 = np.array([-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12], np.float32)
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_ALL = (0x00, 0xFF)

GRIDS: Mapping[GGMLType, Grid] = {
    GGMLType.Q4_0: Grid((2, 18), _ALL, _uniform(4), 0, 8 * _TINY, is_fitted=True),
    GGMLType.Q4_1: Grid((4, 20), _ALL, _uniform(4), 0, 15 * _TINY, is_fitted=True),
    GGMLType.Q5_0: Grid((2, 22), _ALL, _uniform(5), 0, 16 * _TINY, is_fitted=True),
    GGMLType.Q5_1: Grid((4, 24), _ALL, _uniform(5), 0, 31 * _TINY, is_fitted=True),
    GGMLType.Q8_0: Grid((2, 34), (0x80, 0x7F), _uniform(8), 0, 127 * _TINY),
    GGMLType.Q2_K: Grid((16, 80), _ALL, _uniform(2), 80, 15 * 3 * _TINY),
    GGMLType.Q3_K: Grid((0, 96), _ALL, _uniform(3), 108, 32 * 4 * _TINY),
    GGMLType.Q4_K: Grid((16, 144), _ALL, _uniform(4), 0, 63 * 15 * _TINY),
    GGMLType.Q5_K: Grid((16, 176), _ALL, _uniform(5), 0, 63 * 31 * _TINY),
    GGMLType.Q6_K: Grid((0, 192), _ALL, _uniform(6), 208, 128 * 32 * _TINY),
    GGMLType.IQ4_NL: Grid((2, 18), _ALL, _IQ4, 0, 127 * _TINY),
    GGMLType.IQ4_XS: Grid((8, 136), _ALL, _IQ4, 0, 32 * 127 * _TINY),
    GGMLType.TQ1_0: Grid((0, 52), _ALL, _TERNARY, 52, _TINY),
    GGMLType.TQ2_0: Grid((0, 64), (0x00, 0xAA), _TERNARY, 64, _TINY),
    GGMLType.MXFP4: Grid((1, 17), (0xFF, 0x77), _E2M1, None, 2.0**-120),
    GGMLType.NVFP4: Grid((4, 36), (0xFF, 0x77), _E2M1, None, 6 * 2.0**-10),  # scales are E4M3, at least 2**-9
}
_SMALLEST_WITHOUT_GRID = 31 * 62 * _TINY


@dataclass
class BlockReport:
    """Result of judging the blocks of a tensor.

    Attributes:
        n_blocks: Number of blocks.
        wrong: Row and block of each block that no quantiser of the type makes of the source's values.
        fitted: Row and block of each block whose scale was fitted after its codes were chosen.
        n_compensated: Number of rows whose codes are not the nearest ones, with an error that compensation explains.
        error: Sum of the squares of all errors.
        signal: Sum of the squares of all values of the source.
        n_wrong: Number of wrong blocks, of which `wrong` lists the first 65,536.
        n_fitted: Number of blocks with a fitted scale, of which `fitted` lists as many.
    """

    n_blocks: int = 0
    wrong: list[tuple[int, int]] = field(default_factory=list)
    fitted: list[tuple[int, int]] = field(default_factory=list)
    n_compensated: int = 0
    error: float = 0.0
    signal: float = 0.0
    n_wrong: int = 0
    n_fitted: int = 0

    def add(self, part: "BlockReport", rows: np.ndarray) -> None:
        """Add the report of some rows, whose indices in this tensor are `rows`."""
        self.n_blocks += part.n_blocks
        for blocks, new_blocks in ((self.wrong, part.wrong), (self.fitted, part.fitted)):
            blocks += [(int(rows[row]), block) for row, block in new_blocks[: _MOST_LISTED - len(blocks)]]
        self.n_wrong += part.n_wrong
        self.n_fitted += part.n_fitted
        self.n_compensated += part.n_compensated
        self.error += part.error
        self.signal += part.signal

    def all_wrong(self, n_rows: int) -> list[tuple[int, int]]:
        """List the wrong blocks, with those whose fitted scales no importance matrix explains: too few, or too many."""
        share = self.n_fitted / self.n_blocks
        if not _FEW <= share <= _MANY:
            return sorted(self.wrong + self.fitted)
        by_row = Counter(row for row, _ in self.fitted)
        limit = _MANY_OF_ROW * self.n_blocks / n_rows
        return sorted([*self.wrong, *(block for block in self.fitted if by_row[block[0]] > limit)])


def judge_blocks(packed: Packed, actual: Values, source: Values, uncertainty: np.ndarray | float = 0.0) -> BlockReport:
    """Judge some rows of a quantised tensor, `packed`, against the values that they were made from.

    Args:
        packed: The rows as they are stored.
        actual: The same rows, decoded; finite.
        source: Values of the source in the same columns.
        uncertainty: Largest difference of the quantised values from `source`, for values that llorch computed.
    """
    size = _block_size(packed)
    error = actual - source
    grid = GRIDS.get(packed.ggml_type) if isinstance(packed.ggml_type, GGMLType) else None
    report = BlockReport(error.size // size, error=sum_squares(error), signal=sum_squares(source))
    wrong = _find_lost(packed, actual, error, source, size)
    if grid is not None or isinstance(packed, QuantisedMatrix):
        steps = _place(packed, source, actual, uncertainty, grid)
        misplaced = steps.is_misplaced.reshape(len(source), -1, size).any(axis=2)
        if grid is not None and grid.is_fitted and misplaced.any():
            is_fitted = misplaced & ~wrong & _is_uniform_rounding(steps, source, size)
            report.fitted, report.n_fitted = _positions(is_fitted), int(is_fitted.sum())
            misplaced &= ~is_fitted
        elif packed.ggml_type.name.startswith(_COMPENSATING) and misplaced.any():
            is_compensated = _is_compensated(error, source, steps)
            report.n_compensated = int(is_compensated.sum())
            misplaced &= ~is_compensated[:, None]
        wrong |= misplaced
    report.wrong, report.n_wrong = _positions(wrong), int(wrong.sum())
    return report


def _positions(mask: Bool[np.ndarray, "rows blocks"]) -> list[tuple[int, int]]:
    return [(int(row), int(block)) for row, block in np.argwhere(mask)]


def sum_squares(array: np.ndarray) -> float:
    """Sum the squares, row by row in float32, then in float64: a row has at most some thousand values."""
    return float(np.einsum("ij,ij->i", array, array).sum(dtype=np.float64))


def _block_size(packed: Packed) -> int:
    """Return the number of values that share a scale; for super-blocks, the number in one."""
    width = packed.shape[-1]
    if isinstance(packed.ggml_type, GGMLType):
        return BLOCK_SIZES[packed.ggml_type][0]
    group = packed.recipe.group if isinstance(packed, QuantisedMatrix) else width
    return group if isinstance(group, int) and width % group == 0 and group > 1 else width


@dataclass(frozen=True)
class _Steps:
    """Position of values among the numbers of their grids.

    Attributes:
        numbers: Numbers of the grid, ascending.
        code: Number that the file stores.
        nearest_error: Error of the nearest number, as a value; None for a uniform grid of ggml, where nothing needs it.
        is_misplaced: True where another number is nearer by more than rounding.
    """

    numbers: np.ndarray
    code: Values
    nearest_error: Values | None
    is_misplaced: Bool[np.ndarray, "rows width"]


def _place(
    packed: Packed, source: Values, actual: Values, uncertainty: np.ndarray | float, grid: Grid | None
) -> _Steps:
    """Place values of the source and of the file among the numbers of their grids."""
    lowest, highest, numbers = _bounds(packed, source.shape, grid)
    span = highest - lowest
    with np.errstate(all="ignore"):
        per_value = (numbers[-1] - numbers[0]) / span  # infinite or NaN without a scale, where nothing is misplaced
        position = np.clip((source - lowest) * per_value + numbers[0], numbers[0], numbers[-1])
        code = (actual - lowest) * per_value + numbers[0]
        noise = (np.abs(lowest) + np.abs(highest)) * np.abs(per_value) * _scale_error(packed, grid, source.shape)
        noise += (_TINY + uncertainty) * np.abs(per_value) + _ROUNDING  # _TINY: of a stored minimum
        distance = np.abs(position - code)
        if grid is not None and np.all(np.diff(numbers) == 1):
            return _Steps(numbers, code, None, (distance > 0.5 + noise) & (span != 0))
        nearest = numbers[np.searchsorted((numbers[1:] + numbers[:-1]) / 2, position)]
        # A boundary between two numbers moves by `noise`: the errors of both sides differ by twice of it.
        is_misplaced = (distance - np.abs(position - nearest) > 2 * noise) & (span != 0)
        nearest_error = np.where(span != 0, (nearest - numbers[0]) / per_value + lowest - source, actual - source)
    return _Steps(numbers, code, nearest_error, is_misplaced)


def _bounds(packed: Packed, shape: tuple[int, ...], grid: Grid | None) -> tuple[Values, Values, np.ndarray]:
    """Return the values that the lowest and the highest number would have in place of each value, and all numbers."""
    if grid is not None:
        blocks = packed.raw.reshape(-1, BLOCK_SIZES[packed.ggml][1]).copy()
        bounds = []
        for byte in grid.fill:
            blocks[:, slice(*grid.codes)] = byte
            bounds.append(decode(blocks.reshape(-1), packed.ggml, shape))
        return bounds[0], bounds[1], grid.numbers
    assert isinstance(packed, QuantisedMatrix)
    values = packed.values
    codes = np.flatnonzero(np.isfinite(values) & (values != _UNUSED.get(packed.ggml_type.name.partition(",")[0])))
    ends = codes[[values[codes].argmin(), values[codes].argmax()]]
    lowest, highest = (_with_code(packed, int(code)).decode_rows(slice(None)) for code in ends)
    return lowest, highest, np.unique(values[codes])


def _with_code(matrix: QuantisedMatrix, code: int) -> QuantisedMatrix:
    """Return the matrix with one code in all places."""
    read = matrix.recipe.codes

    def codes(parts: Parts, rows: Rows) -> np.ndarray:
        return np.full_like(read(parts, rows), code)

    return replace(matrix, recipe=replace(matrix.recipe, codes=codes))


def _scale_error(packed: Packed, grid: Grid | None, shape: tuple[int, ...]) -> Float[np.ndarray, "rows width"] | float:
    """Return the relative rounding error of the stored scales, which quantisers apply before they round them."""
    if isinstance(packed, QuantisedMatrix):
        return max(error for dtype, error in _SCALE_ERRORS.items() if dtype in _scale_dtypes(packed))
    if grid is None or grid.scale is None:
        return 0.0
    blocks = packed.raw.reshape(-1, BLOCK_SIZES[packed.ggml][1])
    scales = np.abs(blocks[:, grid.scale : grid.scale + 2].copy().view("<f2").astype(np.float32))
    with np.errstate(divide="ignore"):
        relative = np.maximum(_HALF, _TINY / scales)
    return np.repeat(relative.reshape(shape[0], -1), BLOCK_SIZES[packed.ggml][0], axis=1)


def _scale_dtypes(matrix: QuantisedMatrix) -> set[str]:
    """Return the dtypes of the stored parts, and `8-bit` if the scales are quantised, too."""
    return {
        "",
        *(part.dtype for part in matrix.parts.values()),
        *("8-bit" for name in matrix.parts if "nested" in name),
    }


def _find_lost(
    packed: Packed, actual: Values, error: Values, source: Values, size: int
) -> Bool[np.ndarray, "rows blocks"]:
    """Find the blocks whose values the codes do not represent; below the smallest scale a type represents nothing."""
    grid = GRIDS.get(packed.ggml_type) if isinstance(packed.ggml_type, GGMLType) else None
    limit, smallest = _LOST, 0.0
    if isinstance(packed.ggml_type, GGMLType):
        smallest = _SMALLEST_WITHOUT_GRID if grid is None else grid.smallest
        limit = _LOST_AT_TWO_BITS if grid is None or len(grid.numbers) < 4 else _LOST
    squares, error_squares = (
        np.einsum("ijk,ijk->ij", blocks, blocks) / size
        for blocks in (array.reshape(len(source), -1, size) for array in (source, error))
    )
    is_zero = ~actual.reshape(len(source), -1, size).any(axis=2)
    is_unlike = error_squares > limit**2 * squares
    return (is_unlike | is_zero & (squares > 0)) & (error_squares > (2 * smallest) ** 2)


def _is_compensated(error: Values, source: Values, steps: _Steps) -> Bool[np.ndarray, " rows"]:
    """Check by row if compensation explains the codes: many are moved, by little, and the scale is the source's."""
    assert steps.nearest_error is not None
    squares, nearest_squares, source_squares, projections = (
        np.einsum("ij,ij->i", first, second)
        for first, second in ((error, error), (steps.nearest_error,) * 2, (source, source), (error, source))
    )
    with np.errstate(all="ignore"):
        is_near = squares <= _COMPENSATED**2 * nearest_squares
        # Rounding errors of a row are no scale: their projection has a standard deviation, of which 3 are allowed.
        spread = np.sqrt(np.einsum("ij,ij,ij,ij->i", error, error, source, source)) / source_squares
        has_scale = np.abs(projections / source_squares) <= 0.01 + 0.4 * squares / source_squares + 3 * spread
    return is_near & has_scale & (steps.is_misplaced.mean(axis=1) >= _LEAST_MOVED)


def _is_uniform_rounding(steps: _Steps, source: Values, size: int) -> Bool[np.ndarray, "rows blocks"]:
    """Check by block if one scale and one offset, other than the stored ones, round the source to the stored codes.

    Codes q of values x[i] > x[j] must satisfy -1 <= s (x[i] - x[j]) - (q[i] - q[j]) <= 1 for one s and all pairs.
    Values beyond the ends of the grid are clipped: for those the second limit does not hold.
    """
    x, code = (array.reshape(-1, size) for array in (source, np.rint(steps.code)))
    blocks = np.flatnonzero(steps.is_misplaced.reshape(-1, size).any(axis=1))
    is_uniform = np.zeros(len(x), bool)
    for start in range(0, len(blocks), 1 << 10):
        chosen = blocks[start : start + (1 << 10)]
        block_x, q = x[chosen], code[chosen]
        centred = block_x - block_x.mean(axis=1, keepdims=True)
        is_negative = (centred * q).sum(axis=1, keepdims=True) < 0  # the scale of Q4_0 and Q5_0 has either sign
        q = np.where(is_negative, steps.numbers[-1] - q, q)
        is_at_top, is_at_bottom = q >= steps.numbers[-1], q <= 0
        dx = block_x[:, :, None] - block_x[:, None, :]
        dq = q[:, :, None] - q[:, None, :]
        is_clipped = is_at_top[:, :, None] | is_at_bottom[:, None, :]
        with np.errstate(all="ignore"):
            low = np.where(dx > 0, (dq - 1) / dx, -np.inf).max(axis=(1, 2))
            high = np.where((dx > 0) & ~is_clipped, (dq + 1) / dx, np.inf).min(axis=(1, 2))
        is_uniform[chosen] = low <= high * (1 + _ROUNDING)
    return is_uniform.reshape(len(source), -1)
