"""`pytest -k checkpoint --impl=DIR`: a learner's own, an item for each lesson and mode; else not collected."""

import pytest

from llorch.apps.learn.judging import Mode
from llorch.apps.learn.lessons import LESSONS
from llorch.apps.learn.sandbox import outcomes
from llorch.stages.comparison import FAIL, PASS

EACH = [pytest.param(each.number, mode, id=f"checkpoint_{each.number}-{mode}")
        for each in LESSONS for mode in ("isolated", "chained")]  # fmt: skip


@pytest.mark.parametrize(("number", "mode"), EACH)
def test_implementation(number: str, mode: Mode, pytestconfig: pytest.Config):
    (found,) = outcomes(pytestconfig.option.impl, [number], mode, progress=print)
    if found.label == FAIL:
        pytest.fail(found.text, pytrace=False)
    if found.label != PASS:
        pytest.skip(f"{found.label}: {', '.join(found.record['unwritten']) or found.record['reason']}")
