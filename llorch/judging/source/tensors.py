"""Compare every weight of a file with the weight of the source that it was made from, in blocks of rows.

Both models are read through `forms`: the rows are those of the weight, and the columns those of the file's tensor,
whose blocks lie along them. Floats must equal the source's up to the rounding of their type; `grids` judges the rest.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from llorch.files.gguf import GGUFFile
from llorch.files.packed import Packed, StoredType, has_codes
from llorch.files.quant import BLOCK_SIZES, GGMLType, decode, encode
from llorch.files.weights import Weights
from llorch.judging.source.forms import Form, additional, folder_forms, gguf_forms
from llorch.judging.source.grids import BlockReport, judge_blocks, sum_squares

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

RowIds = np.ndarray  # row indices of a weight
Expected = Callable[[RowIds], tuple[np.ndarray, np.ndarray | float]]  # -> values (rows, columns), their uncertainty

_AT_ONCE = 1 << 19  # values judged at once: the arrays of two threads stay small
_BITS = {GGMLType.F32: 24, GGMLType.F16: 11, GGMLType.BF16: 8}  # of the mantissa, with the first
_LEAST_EXPONENT = {GGMLType.F32: -125, GGMLType.F16: -13, GGMLType.BF16: -125}  # of frexp, for normal numbers
_NO_PATH = Path("copy")
_COPIES = (GGMLType.BF16, GGMLType.F16, GGMLType.Q8_0)  # types of a copy between source and file, tried in this order
_FUNCTION_ERROR = 2.0**-21  # relative error of exp and log in float32


@dataclass(frozen=True)
class WrongForm:
    """Mistake that may explain a weight.

    Attributes:
        rule: Name of the mistake, equal for all weights with the same one.
        sentence: The mistake, without the names of the weights.
        expected: Values that the mistake makes of the source; None for a sentence that needs no proof.
    """

    rule: str
    sentence: str
    expected: Expected | None = None


class ModelTensors:
    """Weights of one model by canonical name, see `forms`."""

    def __init__(self, weights: Weights) -> None:
        """Find the form of each tensor of a model, which may be incomplete."""
        self.source, self.config, self.path = weights.source, weights.config, weights.path
        shapes = {name: tensor.shape for name, tensor in self.source.tensors.items()}
        find_forms = gguf_forms if isinstance(self.source, GGUFFile) else folder_forms
        self.forms: Mapping[str, Form] = find_forms(shapes, self.config)
        self.additional = additional(shapes, self.forms, self.config)

    def form(self, name: str) -> Form:
        """Return the form of a weight; the head of a model without one is its embedding."""
        return self.forms[EMBEDDING if name == HEAD and HEAD not in self.forms else name]

    def wrong_shapes(self, name: str) -> list[str]:
        """Describe the tensors of a weight that are missing or have another shape than the configuration requires."""
        form, faults = self.form(name), []
        for tensor in form.tensors:
            if (entry := self.source.tensors.get(tensor)) is None:
                faults.append(f"{tensor} is missing")
            elif entry.shape != form.shape:
                faults.append(f"{tensor} has shape {entry.shape}, expected {form.shape}")
        return faults

    def stored_type(self, name: str) -> StoredType:
        """Return the stored type of a weight, that of the first of several tensors."""
        return self.source.packed(self.form(name).tensors[0]).ggml_type

    def select(self, name: str, rows: RowIds) -> list[Packed]:
        """Return rows of a weight in the stored columns, one matrix for each tensor that holds some."""
        form = self.form(name)
        stored = rows if form.rows is None else form.rows[rows]
        per_tensor = math.prod(form.shape) // form.weight_shape[1]
        numbers = stored // per_tensor
        parts = np.split(stored, np.flatnonzero(np.diff(numbers)) + 1)
        return [self._select_in(form, int(part[0]) // per_tensor, part % per_tensor) for part in parts]

    def _select_in(self, form: Form, number: int, rows: RowIds) -> Packed:
        packed, columns = self.source.packed(form.tensors[number]), form.weight_shape[1]
        if form.is_transposed:
            return _select_transposed(packed, rows)
        if packed.shape[1:] != (columns,):
            packed = replace(packed, shape=(math.prod(packed.shape) // columns, columns))
        is_range = rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all()
        return packed.picked(slice(int(rows[0]), int(rows[-1]) + 1) if is_range else rows)

    def read(self, name: str, rows: RowIds) -> np.ndarray:
        """Compute rows of a weight (rows, columns): float32, or float64 if its values are not the stored ones."""
        form = self.form(name)
        parts = [
            packed.decode_rows(slice(None)).reshape(-1, form.weight_shape[1]) for packed in self.select(name, rows)
        ]
        stored = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return _to_value(stored if form.columns is None else stored[:, form.columns], form)

    def expect(self, name: str) -> Expected:
        """Return the function that reads a weight as the expected values of a file made from this model."""
        kind, is_computed = self.stored_type(name), self.form(name).value == "plus one"

        def expected(rows: RowIds) -> tuple[np.ndarray, np.ndarray | float]:
            values = self.read(name, rows)
            # A converter may add the 1 in the type of the source.
            return values, half_ulp(values, kind) if is_computed and isinstance(kind, GGMLType) else 0.0

        return expected

    def wrong_merges(self, file: "ModelTensors", name: str, rows: RowIds) -> Iterator[WrongForm]:
        """Yield the ways in which an adapter may have been merged wrongly; none without an adapter."""
        return iter(())


def _select_transposed(packed: Packed, rows: RowIds) -> Packed:
    """Return rows of transposed experts (experts, in, out) as a float32 matrix (rows, in)."""
    n_experts, n_in, n_out = packed.shape
    experts = packed.raw.reshape(n_experts, -1)
    matrices = {
        int(number): decode(experts[number], packed.ggml, (n_in, n_out)).T for number in np.unique(rows // n_out)
    }
    array = np.stack([matrices[row // n_out][row % n_out] for row in rows.tolist()])
    return Packed(packed.name, packed.path, array.view(np.uint8).reshape(-1), GGMLType.F32, array.shape)


def _to_value(stored: np.ndarray, form: Form) -> np.ndarray:
    match form.value:
        case "plus one":
            return stored.astype(np.float64) + 1
        case "minus exp":
            with np.errstate(over="ignore"):
                return -np.exp(stored.astype(np.float64))
        case "same":
            return stored


def _to_stored(
    values: np.ndarray, uncertainty: np.ndarray | float, form: Form
) -> tuple[np.ndarray, np.ndarray | float]:
    """Return the values that a form stores for a weight, in the stored columns: the inverse of `ModelTensors.read`."""
    match form.value:
        case "plus one":
            values = values.astype(np.float64) - 1
        case "minus exp":
            with np.errstate(all="ignore"):
                values = np.log(-values.astype(np.float64))
            uncertainty = _FUNCTION_ERROR * (1 + np.abs(values))
        case "same":
            if values.dtype == np.float64:
                uncertainty = uncertainty + _FUNCTION_ERROR / 4 * np.abs(values)
    if form.columns is None:
        return values, uncertainty
    columns = np.argsort(form.columns)
    return values[:, columns], uncertainty[:, columns] if isinstance(uncertainty, np.ndarray) else uncertainty


@dataclass
class WeightReport:
    """Result of comparing one weight.

    Attributes:
        name: Canonical name of the weight.
        types: Stored type in the file and in the source.
        n_rows: Number of rows that were compared.
        blocks: Report about blocks; a row of floats counts as one block.
        copy: Type of a copy between source and file, if the file was made from one.
        n_nonfinite: Number of NaN and infinities.
        range: Least and largest finite value.
        has_channel_scales: True if factors were moved from this weight into the next or from the last into this one.
    """

    name: str
    types: tuple[StoredType, StoredType]
    n_rows: int = 0
    blocks: BlockReport = field(default_factory=BlockReport)
    copy: GGMLType | None = None
    n_nonfinite: int = 0
    range: tuple[float, float] = (math.inf, -math.inf)
    has_channel_scales: bool = False

    @cached_property
    def wrong(self) -> list[tuple[int, int]]:
        """Row and block of each wrong block."""
        return self.blocks.all_wrong(self.n_rows)

    @property
    def n_wrong(self) -> int:
        """Number of wrong blocks, also of those that are not listed."""
        return max(len(self.wrong), self.blocks.n_wrong)

    @property
    def error(self) -> float:
        """Relative error of the whole weight: norm of the difference divided by the norm of the source."""
        return math.sqrt(self.blocks.error / self.blocks.signal) if self.blocks.signal else float(self.blocks.error > 0)


def compare_weight(file: ModelTensors, source: ModelTensors, name: str, pool: Executor) -> WeightReport:
    """Compare a weight of a file with the source's, or else with a copy of that in a type between both."""
    types = file.stored_type(name), source.stored_type(name)
    expected = source.expect(name)
    # Rows after the last token may be padding, which one of both may lack.
    rows = np.arange(min(model.form(name).weight_shape[0] for model in (file, source)))
    report = replace(judge_weight(file, name, expected, pool, rows=rows), types=types)
    if not report.wrong or report.n_nonfinite or source.form(name).weight_shape[1] == 1:
        return report
    sample = sample_rows(report)
    for kind in copy_types(report):
        copied = copy_of(expected, kind)
        if not judge_weight(file, name, copied, pool, rows=sample).wrong:
            whole = judge_weight(file, name, copied, pool, rows=rows)
            return report if whole.wrong else replace(whole, types=types, copy=kind)
    return report


def copy_types(report: WeightReport) -> list[GGMLType]:
    """List the types of a copy between source and file that differ from both and can hold the weight."""
    return [kind for kind in _COPIES if kind not in report.types]


def copy_of(expected: Expected, kind: GGMLType) -> Expected:
    """Return expected values rounded to a type, as a copy in this type stores them."""

    def copied(rows: RowIds) -> tuple[np.ndarray, np.ndarray | float]:
        values, uncertainty = expected(rows)
        if values.shape[1] % BLOCK_SIZES[kind][0] or not np.isfinite(values).all():
            return values, uncertainty
        encoded = np.concatenate([*encode(values.astype(np.float32), kind, name="copy", path=_NO_PATH)])
        return decode(encoded, kind, values.shape), uncertainty

    return copied


def sample_rows(report: WeightReport, n_wrong: int = 48, n_others: int = 16) -> RowIds:
    """Choose rows to try an explanation on: wrong ones, and others spread over the weight."""
    wrong = list(dict.fromkeys(row for row, _ in report.wrong))
    spread = np.linspace(0, len(wrong) - 1, min(n_wrong, len(wrong))).astype(int)
    others = np.linspace(0, report.n_rows - 1, min(n_others, report.n_rows)).astype(int)
    return np.unique([*(wrong[index] for index in spread), *others.tolist()])


def judge_weight(
    file: ModelTensors, name: str, expected: Expected, pool: Executor, *, rows: RowIds | None = None
) -> WeightReport:
    """Judge a weight of a file, or only some rows of it, against expected values."""
    form, kind = file.form(name), file.stored_type(name)
    n_rows, n_columns = form.weight_shape
    all_rows = np.arange(n_rows) if rows is None else rows
    report = WeightReport(name, (kind, kind), len(all_rows))
    step = max(1, _AT_ONCE // n_columns)
    chunks = [all_rows[start : start + step] for start in range(0, len(all_rows), step)]

    def judge(chunk: RowIds) -> WeightReport:
        values, uncertainty = _to_stored(*expected(chunk), form)
        return _judge_rows(file.select(name, chunk), values, uncertainty, name)

    for chunk, part in zip(chunks, pool.map(judge, chunks), strict=True):
        report.blocks.add(part.blocks, chunk)
        report.n_nonfinite += part.n_nonfinite
        report.range = min(report.range[0], part.range[0]), max(report.range[1], part.range[1])
    return report


def _judge_rows(
    matrices: list[Packed], expected: np.ndarray, uncertainty: np.ndarray | float, name: str
) -> WeightReport:
    """Judge rows from one or more tensors; the rows of the report count from 0."""
    kind = matrices[0].ggml_type
    report, start = WeightReport(name, (kind, kind), len(expected)), 0
    for packed in matrices:
        actual = packed.decode_rows(slice(None)).reshape(-1, expected.shape[1])
        rows = slice(start, start + len(actual))
        slack = uncertainty[rows] if isinstance(uncertainty, np.ndarray) else uncertainty
        is_finite = np.isfinite(actual)
        if (n_nonfinite := actual.size - int(np.count_nonzero(is_finite))) > 0:
            report.n_nonfinite += n_nonfinite
            actual = np.where(is_finite, actual, 0)
        low, high = report.range
        report.range = min(low, float(actual.min())), max(high, float(actual.max()))
        if isinstance(packed.ggml_type, GGMLType) and not has_codes(packed.ggml_type):
            blocks = _judge_floats(packed.ggml_type, actual, expected[rows], slack)
        else:
            blocks = judge_blocks(packed, actual, expected[rows].astype(np.float32, copy=False), slack)
        if n_nonfinite:
            rows_with = [(int(row), 0) for row in np.flatnonzero(~is_finite.all(axis=1))]
            blocks.wrong, blocks.n_wrong = blocks.wrong + rows_with, blocks.n_wrong + len(rows_with)
        report.blocks.add(blocks, np.arange(rows.start, rows.stop))
        start = rows.stop
    return report


def _judge_floats(
    kind: GGMLType, actual: np.ndarray, expected: np.ndarray, uncertainty: np.ndarray | float
) -> BlockReport:
    """Judge rows of floats: each value is the expected one, rounded to the nearest number of its type."""
    difference = actual - expected
    squares = sum_squares(expected)
    if not difference.any():
        return BlockReport(len(actual), signal=squares)
    limit = half_ulp(expected, kind) * (1 + 2.0**-10) + uncertainty
    wrong = np.flatnonzero((~(np.abs(difference) <= limit)).any(axis=1))
    positions = [(int(row), 0) for row in wrong]
    return BlockReport(len(actual), positions, n_wrong=len(positions), error=sum_squares(difference), signal=squares)


def half_ulp(values: np.ndarray, kind: GGMLType) -> np.ndarray:
    """Return half the distance of neighbouring numbers of a float type, at each value."""
    _, exponents = np.frexp(values)
    bits = _BITS.get(kind, 53)
    return np.ldexp(1.0, np.maximum(exponents, _LEAST_EXPONENT.get(kind, -1021)) - bits - 1)
