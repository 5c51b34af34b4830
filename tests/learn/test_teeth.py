"""The known mistakes in the run of a solution that passes: each is seen and has its name."""

import numpy as np
import pytest
from scripted_learner import possible

from llorch.learn.check import FORWARD
from llorch.learn.implementation import Implementation
from llorch.learn.lessons import BY_NUMBER, PARTS
from llorch.learn.teeth import Teeth, Tooth, teeth

REFERENCE = Implementation("reference", {name: part.reference for name, part in PARTS.items()})
QUICK = ("04",)
# What is hidden in a part, or made by `linear`, is planted in other lessons.
AT_LEAST = {"05": 4, "05b": 15, "06": 10, "06b": 15}


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=() if number in QUICK else pytest.mark.slow) for number in FORWARD]
)
def test_every_mistake_is_seen_in_a_solution_that_passes(number: str):
    found = teeth(BY_NUMBER[number], REFERENCE)
    assert all(each.bites for each in found.teeth), str(found)
    assert len(found.teeth) >= AT_LEAST.get(number, len(possible(BY_NUMBER[number])) - 2)


def test_what_is_not_seen_is_said():
    blunt = [Tooth("rope-missing", "q_rope", 3.0, ()), Tooth("norm-twice", "attn_norm", np.inf, ("norm-twice",))]
    said = "1 of 2 known mistakes seen\n  rope-missing in q_rope: 3 times what is allowed, not named"
    assert said in str(Teeth("01", blunt))
