"""Engines that `verify` listens to; their output is made from stored goldens, so that none has to be installed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.refusals import assert_tells, refuses
from helpers.stored_goldens import golden_of

from llorch.files import open_weights
from llorch.judging import verify as models
from llorch.judging.goldens.forward import EngineOutput, ReferenceOutput
from llorch.judging.verify import LiveOutput, plan_live, run_engines, verify_ggml
from llorch.model.model import load
from llorch.ops.numerics import GGML
from llorch.runtime.builtin import builtin_path

MODEL = "micro-llama"
GOLDEN = golden_of(MODEL)
IDS = GOLDEN.cases["near"].ids
AT = "far/l1.ffn_act"


class Engine:
    """Stands for an engine that runs; `run_cases` is asked for what it shows."""

    def __init__(self, name: str) -> None:
        self.name = name

    def greedy(self, ids: object, n: int) -> list[int]:
        return GOLDEN.engine_outputs[self.name].greedy[:n].tolist()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, EngineOutput], ReferenceOutput], None]:
    """Have the engines show what a test hands over."""

    @contextmanager
    def opened(name: str, *args: object, **kwargs: object) -> Iterator[Engine]:
        yield Engine(name)

    def show(engine_outputs: Mapping[str, EngineOutput], reference: ReferenceOutput = GOLDEN.reference) -> None:
        monkeypatch.setattr(models, "start", lambda names: None)
        monkeypatch.setattr(models, "open_engine", opened)
        monkeypatch.setattr(models, "run_cases", lambda engine, cases, *, n_greedy: engine_outputs[engine.name])
        monkeypatch.setattr(models, "run_reference", lambda *args, **kwargs: reference)

    return show


def with_value(engine_output: EngineOutput, value: float, name: str = AT) -> EngineOutput:
    """The same, but for one number."""
    arrays = {key: array.copy() for key, array in engine_output.arrays().items()}
    arrays[name].flat[3] = value
    return EngineOutput.from_arrays(arrays, engine_output.load_path)


def asked(failed: dict[str, str] | None) -> LiveOutput:
    plan = plan_live(open_weights(builtin_path(MODEL)), IDS, ["llamacpp", "transformers"])
    return run_engines(plan, progress=print, failed=failed)


@pytest.mark.parametrize("engine", ["llamacpp", "transformers"])
def test_an_engine_that_shows_nan_is_not_heard_and_the_other_one_is(engines: Any, engine: str):
    engines({**GOLDEN.engine_outputs, engine: with_value(GOLDEN.engine_outputs[engine], np.nan)})
    failed: dict[str, str] = {}
    shown = asked(failed)
    assert shown.engine_outputs.keys() == GOLDEN.engine_outputs.keys() - {engine}
    assert failed.keys() == {engine}
    assert_tells(failed[engine], "l1.ffn_act", "far", "NaN")
    with refuses(ValueError, engine, "NaN"):
        asked(None)


@pytest.mark.parametrize("number", [0.5, np.nan])
def test_engines_that_show_numbers_or_nan_as_the_reference_does_are_all_heard(engines: Any, number: float):
    true = replace(GOLDEN.reference, engine_output=with_value(GOLDEN.reference.engine_output, number))
    engines({name: with_value(shown, number) for name, shown in GOLDEN.engine_outputs.items()}, true)
    failed: dict[str, str] = {}
    assert asked(failed).engine_outputs.keys() == {"llamacpp", "transformers"}
    assert failed == {}


def test_a_file_run_as_it_is_has_no_rows_where_the_engine_shows_nan(engines: Any):
    engines({"llamacpp": with_value(GOLDEN.engine_outputs["llamacpp"], np.nan)})
    failed: dict[str, str] = {}
    assert list(verify_ggml(load(builtin_path(MODEL), numerics=GGML), IDS, failed=failed)) == []
    assert failed.keys() == {"llamacpp"}
    assert_tells(failed["llamacpp"], "l1.ffn_act", "far", "NaN")
