"""Rows of the stored goldens, judged with one golden and one suite of expectations for each model of a process.

A suite derives its limits once for each case and dtype. Backends that `verify_stored` judges one after the other would
derive them again and read the goldens again, which is a tenth of what their rows cost. Ceilings of training are kept
too, as every expectation needs one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from helpers.stored_goldens import golden_of, quantised_golden
from llorch.files import Weights
from llorch.judging import verify as models
from llorch.judging.compare import with_load_paths
from llorch.judging.expectations import quantised
from llorch.judging.expectations.forward import ForwardExpectations
from llorch.judging.goldens.forward import Golden
from llorch.judging.goldens.quantised import FOLDER, QuantisedGolden
from llorch.judging.runner_check import RunnerCheck
from llorch.judging.runners import Runner
from llorch.judging.tolerances import training as limits
from llorch.judging.types import Comparison
from llorch.runtime.builtin import goldens_folder

PARTS = ("stage_rows", "decode_rows", "sampler_rows")
OF_THE_FILE = ("tensors", "token_ids")
CEILING = cache(limits.ceiling)
SUITES: dict[str, ForwardExpectations] = {}


@contextmanager
def reuse_suites() -> Iterator[None]:
    """Have those who judge what is stored use what is kept, until the end of the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "read", read)
        patch.setattr(models, "ForwardExpectations", _suite)
        patch.setattr(quantised, "read", _read_quantised)
        patch.setattr(limits, "ceiling", CEILING)
        yield


def read(folder: Path) -> Golden:
    """Read stored goldens once; nobody may change them."""
    assert folder.parent == goldens_folder()
    return golden_of(folder.name)


def _read_quantised(folder: Path) -> QuantisedGolden:
    assert folder == goldens_folder() / FOLDER
    return quantised_golden()


def _suite(name: str, weights: Weights, *arguments: object) -> ForwardExpectations:
    if name not in SUITES:
        SUITES[name] = ForwardExpectations(name, weights, *arguments)  # pyright: ignore[reportArgumentType]
    suite = SUITES[name]
    assert all(
        kept is new for kept, new in zip((suite.cases, suite.engine_outputs, suite.reference), arguments, strict=True)
    )
    return suite


@cache
def forward_rows(model: str) -> Sequence[Comparison]:
    """Judge NumPy on a built-in model; rows stand in the order of `verify_stored`."""
    comparisons = [c for part in PARTS for c in forward_part(model, part)]
    backends = [*dict.fromkeys(c.backend for c in comparisons)]
    return sorted(comparisons, key=lambda c: backends.index(c.backend))


@cache
def forward_part(model: str, part: str) -> Sequence[Comparison]:
    """Judge one of `PARTS`, so that tests of one checkpoint do not wait for the others; the first has the file's rows.

    Args:
        model: A built-in model.
        part: A method of `RunnerCheck`.
    """

    def check_part(expectations: ForwardExpectations, runner: Runner) -> list[Comparison]:
        with runner.arithmetic():
            return [*with_load_paths(getattr(RunnerCheck(expectations, runner), part)(), expectations.load_paths)]

    with reuse_suites(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "check_runner", check_part)
        found = models.verify_stored(model, long=False)  # test_long_contexts.py judges those
        return [c for c in found if part == PARTS[0] or c.stage_ref.name not in OF_THE_FILE]


@cache
def quantised_rows() -> Sequence[Comparison]:
    """Judge all that checkpoint 13 compares."""
    from helpers import stored_rows  # which imports torch

    with reuse_suites():
        return stored_rows.quantised_rows()


@cache
def compare_torch(target: str, model: str) -> Sequence[Comparison]:
    """Judge a target of the torch path on a built-in model."""
    from helpers import stored_rows

    with reuse_suites():
        return stored_rows.compare_torch(target, model)
