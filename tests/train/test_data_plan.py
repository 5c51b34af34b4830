"""Which rows a step trains on."""

import numpy as np
import pytest

from llorch.train.batch import Example
from llorch.train.data.packing import Rows
from llorch.train.data.plan import Plan, batches, shuffled


def rows(count: int) -> Rows:
    return Rows([Example((index, index), (index, index), f"d.jsonl:{index}") for index in range(count)])


def plan(count: int = 10, *, batch_size: int = 2, accumulation: int = 2, seed: int = 3) -> Plan:
    return Plan(rows(count), batch_size=batch_size, accumulation=accumulation, seed=seed)


def seen(found: Plan, number: int) -> list[list[int]]:
    return [batch.ids[:, 0].tolist() for batch in found.step(number)]


def test_an_epoch_takes_every_row_once_and_its_last_step_may_be_shorter():
    found = plan()
    assert found.steps_per_epoch == 3
    steps = [seen(found, number) for number in range(3)]
    assert [[len(batch) for batch in step] for step in steps] == [[2, 2], [2, 2], [2]]
    assert sorted(index for step in steps for batch in step for index in batch) == list(range(10))


def test_every_epoch_and_every_seed_has_an_order_of_its_own():
    def epoch(found: Plan, number: int) -> list[list[list[int]]]:
        return [seen(found, 3 * number + step) for step in range(3)]

    orders = [epoch(plan(seed=seed), number) for seed in (0, 1) for number in (0, 1)]
    assert len({str(order) for order in orders}) == 4


def test_a_step_depends_on_its_number_only():
    forward, backward = plan(), plan()
    want = [seen(forward, number) for number in range(12)]
    assert [seen(backward, number) for number in reversed(range(12))] == want[::-1]
    shuffled.cache_clear()
    assert seen(plan(), 7) == want[7]


def test_accumulation_only_cuts_the_rows_of_a_step():
    whole, cut = plan(batch_size=6, accumulation=1), plan(batch_size=2, accumulation=3)
    for number in range(4):
        order = [index for batch in seen(whole, number) for index in batch]
        assert [index for batch in seen(cut, number) for index in batch] == order
        assert [row[0].source for row in cut.rows(number)] == [f"d.jsonl:{index}" for index in order]


def test_the_order_is_the_one_that_was_stored():
    # The bits of PCG64 do not change between versions of NumPy, and so a resumed run goes on as it would have.
    assert shuffled(8, 0, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert shuffled(8, 7, 2).tolist() == [6, 4, 0, 5, 7, 1, 3, 2]


def test_orders_are_fair():
    firsts = np.bincount([shuffled(5, 0, epoch)[0] for epoch in range(2000)])
    assert firsts.min() > 320
    assert firsts.max() < 480


def test_rows_to_evaluate_come_in_order():
    found = list(batches(rows(5), 2))
    assert [batch.ids[:, 0].tolist() for batch in found] == [[0, 1], [2, 3], [4]]
    assert list(batches(rows(0), 2)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
        ({"accumulation": 0}, "accumulation: expected at least 1, got 0"),
        ({"seed": -1}, "seed: expected at least 0, got -1"),
        ({"count": 0}, "data: expected at least one row to train on, got none"),
    ],
)
def test_settings_without_meaning_are_refused(change: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        plan(**change)
