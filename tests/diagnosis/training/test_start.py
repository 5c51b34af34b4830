"""Dumps of a right trainer with `--adapter` of an earlier or later step: no engine is accused, and a note says so."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.without_gaps import without_gaps

from benchmarks.diagnosis import training_cases
from benchmarks.diagnosis.training_bugs import BUGS, Bug
from benchmarks.diagnosis.training_cases import TrainingCase
from llorch.diagnosis.training.diagnose import diagnose_training
from llorch.diagnosis.verdict import Diagnosis
from llorch.engines.dumps.index import open_raw
from llorch.files import open_weights
from llorch.judging.goldens.training_recipe import make_adapter
from llorch.lora.adapter import Adapter, LoraTensors
from llorch.runtime.builtin import builtin_path

MODEL = "micro-qwen3"


def diagnosed(
    folder: Path, arrays: tuple[str, ...], adapter: Adapter | None = None, *, bug: Bug | None = None, late: int = 0
) -> Diagnosis:
    """Diagnose a dump of some arrays; `adapter` replaces the adapter of `late`, see `TrainingCase`."""
    case = TrainingCase(bug, MODEL, "some", late=late)
    with without_gaps(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(training_cases.STYLES, "some", arrays)
        path, adapter = case.write(folder), adapter or case.given_adapter()
        return diagnose_training(open_weights(builtin_path(MODEL)), adapter, open_raw(path))


@pytest.mark.parametrize(
    ("arrays", "late", "facts"),
    [
        (("loss", "grad", "exp_avg", "param"), -1, ("before step 2", "its numbers give")),
        (("loss", "grad"), 1, ("before step 1", "its numbers give")),  # moments follow from the gradients
        (("loss",), 1, ("before step 1", "before step 2", "did not judge")),
        (("loss", "param"), -1, ("later steps", "did not judge step 2")),
    ],
)
def test_adapter_of_another_step_is_noted(arrays: tuple[str, ...], late: int, facts: tuple[str, ...], tmp_path: Path):
    diagnosis = diagnosed(tmp_path, arrays, late=late)
    assert diagnosis.findings == []
    (note,) = diagnosis.notes
    assert [fact for fact in ("--adapter", "of another step", *facts) if fact not in note] == []
    assert diagnosis.results


@pytest.mark.slow
def test_adapter_with_other_numbers_is_no_adapter_of_another_step(tmp_path: Path):
    right = make_adapter(open_weights(builtin_path(MODEL)).config)
    tensors = {name: LoraTensors(lora.lora_A, -lora.lora_B) for name, lora in right.tensors.items()}
    diagnosis = diagnosed(tmp_path, ("loss", "exp_avg", "param"), replace(right, tensors=tensors))
    assert not diagnosis.is_right
    assert diagnosis.notes == ()


@pytest.mark.slow
def test_mistake_beside_an_adapter_of_another_step_is_still_named(tmp_path: Path):
    bug = next(bug for bug in BUGS if bug.name == "eps-inside")
    (finding,) = diagnosed(tmp_path, ("loss", "grad"), bug=bug, late=1).findings
    assert [cause.name for cause in finding.causes] == ["adamw-eps-inside-root"]
    assert np.isclose(finding.causes[0].explained_share, 1.0, atol=1e-2)
