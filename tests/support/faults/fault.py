"""A fault injected into running code, and the check that must see it: the rows of the table of fault injection."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from llorch.judging.types import Comparison
from llorch.ops.numerics import DtypeName
from llorch.stages.comparison import FAIL

ANY = ""  # mode
TRAINER = "as trainer"  # variant of a training run in torch: the way that saves memory
Inject = Callable[[pytest.MonkeyPatch], None]
RUNNERS = {  # backend -> function of the fault, the patch and a folder, which returns comparisons
    "numpy": "faults.into_numpy:of_golden",
    "numpy-float64": "faults.into_numpy:in_float64",
    "numpy-ggml": "faults.into_numpy:of_packed",
    "numpy-live": "faults.into_numpy:live",
    "numpy-float64-live": "faults.into_numpy:in_float64_live",
    "numpy-ggml-live": "faults.into_numpy:of_packed_live",
    "torch": "faults.into_torch:of_golden",
    "torch-live": "faults.into_torch:live",
    "training": "faults.into_training:in_numpy",
    "training-torch": "faults.into_training:in_torch",
    "training-float64": "faults.into_training:in_float64",
    "training-torch-float64": "faults.into_training:in_torch_float64",
}


@dataclass(frozen=True)
class Check:
    """The comparisons that must fail, and those that must not.

    Attributes:
        first: Checkpoint, stage and layer of the first comparison that fails, as far as they are given.
        first_in: Mode in which the first one is sought.
        factor: How many times over the tolerance it is, for each reference engine.
        engines: The reference engines that must all show it so.
        red: Mode -> all stages that fail in it.
        by: How many times over the tolerance a comparison must be, to count in `red`.
        some: Mode and stage of a comparison that fails, beside others.
        every: Mode and stage of comparisons that all fail.
        over: Mode and stage -> how many times over the tolerance its worst comparison is at least.
        only_in: Modes in which comparisons may fail.
        cases: Cases in which comparisons fail.
        others: Verdicts of comparisons that do not fail.
    """

    first: tuple[str | int | None, ...] = ()
    first_in: str = ANY
    factor: float = 0
    engines: frozenset[str] = frozenset()
    red: Mapping[str, Collection[str]] = field(default_factory=dict)
    by: float = 0
    some: tuple[str, str] | None = None
    every: tuple[str, str] | None = None
    over: Mapping[tuple[str, str], float] = field(default_factory=dict)
    only_in: frozenset[str] | None = None
    cases: frozenset[str] = frozenset()
    others: frozenset[str] | None = None


@dataclass(frozen=True)
class InjectedFault:
    """A row of the table.

    Attributes:
        name: The fault, as its backend knows it.
        backend: Key of `RUNNERS`.
        model: In which it is injected.
        check: How it is seen; without one, as in a right run, nothing may fail.
        case: Input.
        rows: Comparisons that are made, by the methods of a suite.
        variant: Variant of the torch path, or of the run.
        dtype: In which it computes.
    """

    name: str
    backend: str
    model: str
    check: Check
    case: str = "near"
    rows: str = "stage_rows"
    variant: str = ""
    dtype: DtypeName = "float32"

    def __str__(self) -> str:
        """Name the row in `pytest -k`."""
        shown = (self.name, self.model, self.variant.strip("-"), "" if self.dtype == "float32" else self.dtype)
        return "-".join(filter(None, shown)).replace(" ", "-")


def factor(comparison: Comparison) -> float:
    """Divide the error of a comparison by its tolerance."""
    return comparison.difference.over(replace(comparison.tolerance, common_factor=None))


def assert_seen(fault: InjectedFault, patch: pytest.MonkeyPatch, folder: Path) -> Sequence[Comparison]:
    """Inject a fault, judge the run, and require its check; returns the comparisons."""
    rows: Sequence[Comparison] = resolve_name(RUNNERS[fault.backend])(fault, patch, folder)
    check, failing = fault.check, [row for row in rows if row.verdict == FAIL]
    is_right = check == Check(others=check.others)
    assert rows
    assert bool(failing) != is_right, failing[:1] or "nothing fails"
    if check.first:
        _assert_first(check, rows, failing)
    for mode, stages in check.red.items():
        assert {r.stage_ref.name for r in failing if mode in (ANY, r.mode) and factor(r) >= check.by} == {*stages}, mode
    if check.some:
        assert check.some in {(row.mode, row.stage_ref.name) for row in failing}
    if check.every:
        assert {row.verdict for row in rows if (row.mode, row.stage_ref.name) == check.every} == {FAIL}
    for (mode, stage), least in check.over.items():
        factors = [factor(row) for row in rows if mode in (ANY, row.mode) and _group(row) == stage]
        assert max(factors) >= least, f"{stage}: {max(factors):.1f} times the tolerance"
    if check.only_in is not None:
        assert {row.mode for row in failing} <= check.only_in
    if check.others is not None:
        assert {row.verdict for row in rows} - {FAIL} <= check.others
    assert check.cases <= {row.stage_ref.run for row in failing}
    return rows


def _assert_first(check: Check, comparisons: Sequence[Comparison], failing: Sequence[Comparison]) -> None:
    """The first comparison that fails is where it has to be, and all engines show it by far."""
    first = next(c for c in failing if check.first_in in (ANY, c.mode))
    assert _place(first)[: len(check.first)] == check.first, first
    run = _place(first), first.stage_ref.run, first.mode
    alike = [c for c in comparisons if (_place(c), c.stage_ref.run, c.mode) == run]
    assert check.engines <= {c.engine for c in alike}
    assert all(factor(c) >= check.factor for c in alike), [factor(c) for c in alike]


def _place(comparison: Comparison) -> tuple[str, str, int | None]:
    return comparison.stage_ref.checkpoint, comparison.stage_ref.name, comparison.stage_ref.layer


def _group(comparison: Comparison) -> str:
    """The stage of the forward pass, or the group of stages of training."""
    return comparison.stage_ref.stage or comparison.stage_ref.name


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Inject:
    """Replace a function or method by one made of it."""
    return lambda patch: patch.setattr(owner, name, make(getattr(owner, name)))
