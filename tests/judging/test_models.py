"""Engines that `verify` listens to; their output is made from stored goldens, so that none has to be installed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from runs.refusals import assert_tells, refuses
from runs.stored_goldens import golden_of

from llorch.files import open_weights
from llorch.judging import verify as models
from llorch.judging.goldens.forward import EngineOutput, Truth
from llorch.judging.verify import LiveOutput, ask, plan_live, verify_as_stored
from llorch.model.model import load
from llorch.ops.numerics import GGML
from llorch.runtime.builtin import builtin_path

MODEL = "micro-llama"
GOLDEN = golden_of(MODEL)
IDS = GOLDEN.cases["near"].ids
AT = "far/l1.ffn_act"


class Engine:
    """Stands for an engine that runs; `take` is asked for what it shows."""

    def __init__(self, name: str) -> None:
        self.name = name

    def greedy(self, ids: object, n: int) -> list[int]:
        return GOLDEN.evidence[self.name].greedy[:n].tolist()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, EngineOutput], Truth], None]:
    """Have the engines show what a test hands over."""

    @contextmanager
    def opened(name: str, *given: object, **named: object) -> Iterator[Engine]:
        yield Engine(name)

    def show(evidence: Mapping[str, EngineOutput], truth: Truth = GOLDEN.truth) -> None:
        monkeypatch.setattr(models, "start", lambda names: None)
        monkeypatch.setattr(models, "open_producer", opened)
        monkeypatch.setattr(models, "take", lambda engine, cases, *, n_greedy: evidence[engine.name])
        monkeypatch.setattr(models, "take_truth", lambda *given, **named: truth)

    return show


def with_value(shown: EngineOutput, value: float, name: str = AT) -> EngineOutput:
    """The same, but for one number."""
    arrays = {key: array.copy() for key, array in shown.arrays().items()}
    arrays[name].flat[3] = value
    return EngineOutput.from_arrays(arrays, shown.route)


def asked(failed: dict[str, str] | None) -> LiveOutput:
    return ask(
        plan_live(open_weights(builtin_path(MODEL)), IDS, ["llamacpp", "transformers"]), say=print, failed=failed
    )


@pytest.mark.parametrize("engine", ["llamacpp", "transformers"])
def test_an_engine_that_shows_nan_is_not_heard_and_the_other_one_is(engines: Any, engine: str):
    engines({**GOLDEN.evidence, engine: with_value(GOLDEN.evidence[engine], np.nan)})
    failed: dict[str, str] = {}
    shown = asked(failed)
    assert shown.evidence.keys() == GOLDEN.evidence.keys() - {engine}
    assert failed.keys() == {engine}
    assert_tells(failed[engine], "l1.ffn_act", "far", "NaN")
    with refuses(ValueError, engine, "NaN"):
        asked(None)


def test_engines_that_show_numbers_are_all_heard(engines: Any):
    engines(GOLDEN.evidence)
    failed: dict[str, str] = {}
    assert asked(failed).evidence.keys() == {"llamacpp", "transformers"}
    assert failed == {}


def test_nan_that_the_truth_has_too_is_no_fault_of_an_engine(engines: Any):
    true = replace(GOLDEN.truth, evidence=with_value(GOLDEN.truth.evidence, np.nan))
    engines({name: with_value(shown, np.nan) for name, shown in GOLDEN.evidence.items()}, true)
    failed: dict[str, str] = {}
    assert asked(failed).evidence.keys() == {"llamacpp", "transformers"}
    assert failed == {}


def as_stored(failed: dict[str, str] | None) -> list:
    model = load(builtin_path(MODEL), numerics=GGML)
    return list(verify_as_stored(model, IDS, failed=failed))


def test_a_file_run_as_it_is_has_no_rows_where_the_engine_shows_nan(engines: Any):
    engines({"llamacpp": with_value(GOLDEN.evidence["llamacpp"], np.nan)})
    failed: dict[str, str] = {}
    assert as_stored(failed) == []
    assert failed.keys() == {"llamacpp"}
    assert_tells(failed["llamacpp"], "l1.ffn_act", "far", "NaN")
