"""Tensors of which each rank has a part."""

import pytest
from helpers.sharded_runs import joined_together

from llorch.pytorch.distributed.launch import on_ranks

pytestmark = pytest.mark.usefixtures("warm_ranks")


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 3}, {"dp": 3, "tp": 1}])
def test_many_tensors_joined_at_once_are_those_that_were_dealt(axes: dict[str, int]):
    assert on_ranks(axes["dp"] * axes["tp"], joined_together, axes) == []
