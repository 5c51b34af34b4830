"""Causes that one number of a training dump would fit: a setting needs a second number, a known mistake a close one."""

import numpy as np
import pytest
from helpers.refusals import assert_tells
from helpers.without_gaps import without_gaps

from benchmarks.diagnosis.training_bugs import BUGS
from benchmarks.diagnosis.training_cases import TrainingCase, score
from llorch.diagnosis.verdict import Finding

BY_NAME, SLOW = {bug.name: bug for bug in BUGS}, pytest.mark.slow


def findings(name: str, style: str) -> list[Finding]:
    with without_gaps():
        return list(score(TrainingCase(BY_NAME[name], "micro-llama", style)).diagnosis.findings)


@pytest.mark.parametrize("name", ["eight-times", pytest.param("scale-doubled", marks=SLOW)])
def test_setting_that_one_number_fits_is_no_cause(name: str):
    (finding,) = findings(name, "one-loss")
    assert (finding.kind, finding.causes, finding.near_misses) == ("unknown", (), ())
    assert_tells(finding.sentence, "11.0331", "logits", "token_losses", "grad.*", "second step", "step0.param.*")


def test_setting_that_two_numbers_fit_is_the_cause():
    (finding,) = findings("eight-times", "losses")
    assert [(cause.name, float(cause.value)) for cause in finding.causes] == [("loss-normalisation", pytest.approx(8))]


@pytest.mark.parametrize(
    ("name", "cause"), [("adapter-off", "lora-delta-missing"), ("adapter-off-v_proj", "lora-partly-applied")]
)
def test_known_mistake_is_named_by_one_number(name: str, cause: str):
    (finding,) = findings(name, "one-loss")
    assert [cause.name for cause in finding.causes] == [cause]
    assert np.isclose(finding.causes[0].explained_share, 1.0, atol=1e-4)
