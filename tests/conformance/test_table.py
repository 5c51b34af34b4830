"""A family is a row of the tests, too."""

import pytest
from builders import tiny_models
from builders.families import FAMILIES, labelled

from llorch.families.table import FAMILIES as TABLE


def test_every_family_has_a_row():
    assert FAMILIES.keys() | tiny_models.FAMILIES.keys() == TABLE.keys()


@pytest.mark.parametrize("column", ["gradients", "engine_cases"])
def test_every_family_has_a_model_in_each_column(column: str):
    assert {family for family, _ in labelled(column).values()} == FAMILIES.keys()
