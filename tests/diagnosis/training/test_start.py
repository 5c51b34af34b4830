"""Dumps of a right trainer with `--adapter` of an earlier or later step: no engine is accused, and a note says so."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.without_gaps import without_gaps

from benchmarks.diagnosis import training_cases
from benchmarks.diagnosis.training_bugs import BUGS
from benchmarks.diagnosis.training_cases import TrainingCase
from llorch.diagnosis.training.diagnose import diagnose_training
from llorch.diagnosis.verdict import Diagnosis
from llorch.engines.dumps.index import open_raw
from llorch.files import open_weights
from llorch.lora.adapter import Adapter, LoraTensors
from llorch.runtime.builtin import builtin_path

MODEL = "micro-llama"


def diagnosed(folder: Path, case: TrainingCase, adapter: Adapter) -> Diagnosis:
    path = case.write(folder)
    with without_gaps():
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
def test_adapter_of_another_step_is_noted(
    arrays: tuple[str, ...], late: int, facts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(training_cases.STYLES, "some", arrays)
    case = TrainingCase(None, MODEL, "some", late=late)
    diagnosis = diagnosed(tmp_path, case, case.given_adapter())
    assert diagnosis.findings == []
    (note,) = diagnosis.notes
    assert [fact for fact in ("--adapter", "of another step", *facts) if fact not in note] == []
    assert diagnosis.results


def test_adapter_with_other_numbers_is_no_adapter_of_another_step(tmp_path: Path):
    case = TrainingCase(None, MODEL, "usual")
    right = case.given_adapter()
    tensors = {name: LoraTensors(lora.lora_A, -lora.lora_B) for name, lora in right.tensors.items()}
    diagnosis = diagnosed(tmp_path, case, replace(right, tensors=tensors))
    assert not diagnosis.is_right
    assert diagnosis.notes == ()


@pytest.mark.slow
def test_mistake_beside_an_adapter_of_another_step_is_still_named(tmp_path: Path):
    bug = next(bug for bug in BUGS if bug.name == "eps-inside")
    case = TrainingCase(bug, MODEL, "whole", late=1)
    (finding,) = diagnosed(tmp_path, case, case.given_adapter()).findings
    assert [cause.name for cause in finding.causes] == ["adamw-eps-inside-root"]
    assert np.isclose(finding.causes[0].explained_share, 1.0, atol=1e-2)
