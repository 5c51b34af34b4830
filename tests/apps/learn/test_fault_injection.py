"""The known mistakes in the run of a solution that passes: each is seen and has its name."""

import numpy as np
import pytest
from fakes.scripted_learner import possible
from helpers.refusals import assert_tells

from llorch.apps.learn.check import FORWARD
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.fault_injection import FaultReport, InjectedFault, inject_faults
from llorch.apps.learn.lessons import BY_NUMBER, PARTS

REFERENCE = Implementation("reference", {name: exercise.reference for name, exercise in PARTS.items()})
QUICK = ("03",)
# What is hidden in a part, or made by `linear`, is planted in other lessons.
AT_LEAST = {"05": 4, "05b": 15, "06": 10, "06b": 15}


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=() if number in QUICK else pytest.mark.nightly) for number in FORWARD]
)
def test_every_mistake_is_seen_in_a_solution_that_passes(number: str):
    found = inject_faults(BY_NUMBER[number], REFERENCE)
    assert all(each.bites for each in found.faults), str(found)
    assert len(found.faults) >= AT_LEAST.get(number, len(possible(BY_NUMBER[number])) - 2)


def test_what_is_not_seen_is_said():
    blunt = InjectedFault("rope-missing", "q_rope", 3.0, ())
    sharp = InjectedFault("norm-twice", "attn_norm", np.inf, ("norm-twice",))
    head, line = str(FaultReport("01", [blunt, sharp])).splitlines()
    assert_tells(head, "checkpoint_01", "1 of 2")
    assert_tells(line, "rope-missing", "q_rope", 3)
    taken = str(FaultReport("01", [InjectedFault("rope-missing", "q_rope", np.inf, ("norm-twice",))])).splitlines()
    assert_tells(taken[1], "rope-missing", "q_rope", "norm-twice")
