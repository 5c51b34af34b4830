"""The judge: it compares an array of llorch with the expected one. Every row of a verification is made here.

An expectation is made from goldens alone: a place, a `mode` (how the place is reached), the engine whose array is
expected, and the tolerance. A runner computes; `judge` compares.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property

import numpy as np

from llorch.engines import LoadPath
from llorch.judging.expert_selection import ExpertSelection
from llorch.stages.comparison import FAIL, PASS, TIE, Difference, Tolerance, measure, measure_in
from llorch.stages.stage_ref import StageRef


@dataclass(frozen=True)
class Comparison:
    """One comparison and its verdict."""

    model: str
    checkpoint: str
    stage: str
    layer: int | None
    case: str
    producer: str
    backend: str
    mode: str  # isolated, chained, decode, exact, free: with no flip replaced; whole, in parts: of long contexts
    error: float  # ours from the golden
    worst: float  # its worst element
    truth_error: float  # llorch's from the float64 reference; NaN for isolated rows, which start from the golden
    producer_error: float  # the golden from the float64 reference
    tolerance: float
    tolerance_worst: float
    verdict: str
    note: str = ""
    flips: int = 0  # values of this stage that the next product rounds to another side than the golden's
    token_error: float = math.nan  # of the token that is nearest to its limit; NaN where tokens are not told apart
    tolerance_token: float = math.nan
    common_factor: float = math.nan  # of llorch's array on the golden; 1 is right, NaN where it is not judged
    tolerance_factor: float = math.nan  # how far from 1 it may be
    route: LoadPath | None = None  # how the engine loaded the file; None where the file or its text is compared
    place: StageRef = field(default=StageRef("", ""), repr=False, compare=False)

    def record(self) -> dict[str, object]:
        """Return the comparison as `--json` gives it; the place is in the other fields."""
        shown: dict[str, object] = {each.name: getattr(self, each.name) for each in fields(self)}
        del shown["place"]
        return shown | {"route": self.route and asdict(self.route)}


@dataclass(frozen=True)
class Expectation:
    """Expected value and tolerance of one array.

    Attributes:
        place: Where it stands.
        mode: How it is reached, as in `Comparison`.
        witness: The engine that made `want`.
        want: The golden.
        limit: The tolerance.
        truth: The same array of the float64 reference; None where there is none, as for isolated stages.
        witness_error: The golden's distance from the float64 reference, where that is known without `truth`.
        masked: Whether -inf marks masked entries.
        token_axis: Along which tokens stand, where each is judged.
        unit: What differences are measured in, instead of as shares of the golden.
        choice: What experts were chosen by, where the array is a choice.
    """

    place: StageRef
    mode: str
    witness: str
    want: np.ndarray
    limit: Tolerance
    truth: np.ndarray | None = None
    witness_error: float | None = None
    masked: bool = False
    token_axis: int | None = None
    unit: float | None = None
    choice: ExpertSelection | None = None

    def difference(self, got: np.ndarray | None, want: np.ndarray | None = None) -> Difference:
        """Measure the difference between an array and the golden, or between whole arrays if `want` is given."""
        if self.choice is not None:
            return (self.choice if want is None else replace(self.choice, ids=want)).difference(got)
        if self.unit is not None:
            return measure_in(got, self.want if want is None else want, unit=self.unit)
        if want is not None:
            return measure(got, want, masked=self.masked)
        return measure(got, self.want, masked=self.masked, token_axis=self.token_axis)

    def from_truth(self, array: np.ndarray | None) -> float:
        """Measure the error of an array against the float64 reference; NaN if there is none."""
        if self.truth is None:
            return math.nan
        return self.difference(None if array is None else array.astype(self.truth.dtype), self.truth).error

    @cached_property
    def of_witness(self) -> float:
        """Error of the golden against the float64 reference; the same for all runners that have to reproduce it."""
        return self.from_truth(self.want) if self.witness_error is None else self.witness_error


def judge(claim: Expectation, got: np.ndarray | None, *, model: str, backend: str) -> Comparison:
    """Compare an array of llorch with what is expected of it."""
    found = claim.difference(got)
    same = claim.want is claim.truth and found.fault is None
    row = row_of(
        found, claim.limit, claim.place, claim.mode, claim.witness, model=model, backend=backend,
        truth_error=found.error if same else claim.from_truth(got),
        producer_error=0.0 if same else claim.of_witness,
    )  # fmt: skip
    if claim.choice is None or got is None or found.fault is not None or not (note := claim.choice.note(got)):
        return row
    return tied(row, note) if row.verdict == PASS else replace(row, note=note)


def row_of(
    found: Difference, limit: Tolerance, place: StageRef, mode: str, witness: str, *, model: str, backend: str,
    truth_error: float = math.nan, producer_error: float = math.nan,
) -> Comparison:  # fmt: skip
    """Compare a difference with its tolerance. Errors against the float64 reference are NaN where there is none."""
    token_error, token_limit = found.nearest_token(limit)
    judges_factor = limit.common_factor is not None and found.fault is None
    return Comparison(
        model=model,
        checkpoint=place.checkpoint,
        stage=place.name,
        layer=place.layer,
        case=place.run,
        producer=witness,
        backend=backend,
        mode=mode,
        error=found.error,
        worst=found.worst,
        truth_error=truth_error,
        producer_error=producer_error,
        tolerance=limit.error,
        tolerance_worst=limit.worst,
        verdict=PASS if found.within(limit) else FAIL,
        note=found.fault or _describe_factor(found, limit),
        token_error=token_error,
        tolerance_token=token_limit,
        common_factor=found.common_factor if judges_factor else math.nan,
        tolerance_factor=limit.common_factor if judges_factor and limit.common_factor is not None else math.nan,
        place=place,
    )


def _describe_factor(found: Difference, limit: Tolerance) -> str:
    """Describe a common factor beyond its tolerance; empty if it is within."""
    if found.has_no_factor(limit):
        return ""
    return f"common factor {found.common_factor:.4f}, expected 1 within {limit.common_factor:.4f}"


def exact_row(
    place: StageRef, witness: str, wrong: float, note: str, *, model: str, backend: str = "numpy"
) -> Comparison:
    """Compare things that must be equal; `wrong` is the share that is not equal."""
    return Comparison(
        model=model,
        checkpoint=place.checkpoint,
        stage=place.name,
        layer=place.layer,
        case=place.run,
        producer=witness,
        backend=backend,
        mode="exact",
        error=wrong,
        worst=wrong,
        truth_error=wrong,
        producer_error=0.0,
        tolerance=0.0,
        tolerance_worst=0.0,
        verdict=FAIL if wrong else PASS,
        note=note,
        place=place,
    )


def routed(rows: Iterable[Comparison], routes: Mapping[str, LoadPath]) -> Iterator[Comparison]:
    """Add the load path of its reference engine to each comparison."""
    return (replace(row, route=routes[row.producer]) for row in rows)


def tied(row: Comparison, note: str) -> Comparison:
    """Mark a comparison as a near-tie."""
    return replace(row, verdict=TIE, note=note)
