"""Which rows a step trains on."""

import numpy as np
import pytest
from helpers.refusals import Refusal, row

from llorch.training.batch import IGNORED, PADDING, Example, Examples
from llorch.training.data.plan import PackedRows, TrainingOrder, batches, best_fit, make_batch, shuffled


def rows(count: int) -> PackedRows:
    return PackedRows([Example((index, index), (index, index), f"d.jsonl:{index}") for index in range(count)])


def plan(count: int = 10, *, batch_size: int = 2, accumulation: int = 2, seed: int = 3) -> TrainingOrder:
    return TrainingOrder(rows(count), batch_size=batch_size, accumulation=accumulation, seed=seed)


def first_ids(order: TrainingOrder, number: int) -> list[list[int]]:
    return [batch.ids[:, 0].tolist() for batch in order.step(number)]


def test_an_epoch_takes_every_row_once_and_its_last_step_may_be_shorter():
    found = plan()
    assert found.steps_per_epoch == 3
    steps = [first_ids(found, number) for number in range(3)]
    assert [[len(batch) for batch in step] for step in steps] == [[2, 2], [2, 2], [2]]
    assert sorted(index for step in steps for batch in step for index in batch) == list(range(10))


def test_every_epoch_and_every_seed_has_an_order_of_its_own():
    def epoch(order: TrainingOrder, number: int) -> list[list[list[int]]]:
        return [first_ids(order, 3 * number + step) for step in range(3)]

    assert len({str(epoch(plan(seed=seed), number)) for seed in (0, 1) for number in (0, 1)}) == 4


def test_a_step_depends_on_its_number_only():
    forward, backward = plan(), plan()
    expected = [first_ids(forward, number) for number in range(12)]
    assert [first_ids(backward, number) for number in reversed(range(12))] == expected[::-1]
    shuffled.cache_clear()
    assert first_ids(plan(), 7) == expected[7]


def test_accumulation_only_cuts_the_rows_of_a_step():
    whole, cut = plan(batch_size=6, accumulation=1), plan(batch_size=2, accumulation=3)
    for number in range(4):
        order = [index for batch in first_ids(whole, number) for index in batch]
        assert [index for batch in first_ids(cut, number) for index in batch] == order
        assert [sample for batch in cut.step(number) for sample in batch.samples] == order
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
    assert [batch.samples.tolist() for batch in found] == [[0, 1], [2, 3], [4]]
    assert list(batches(rows(0), 2)) == []


@pytest.mark.parametrize(
    "refusal",
    [
        row("batch_size", lambda: plan(batch_size=0), ValueError, where="batch_size", expected=1, got=0),
        row("accumulation", lambda: plan(accumulation=0), ValueError, where="accumulation", expected=1, got=0),
        row("seed", lambda: plan(seed=-1), ValueError, where="seed", expected=0, got=-1),
        row("no row", lambda: plan(0), ValueError, where="data", expected="one row", got="none"),
    ],
)
def test_settings_without_meaning_are_refused(refusal: Refusal):
    refusal.check()


def example(length: int, first: int = 1, prompt: int = 0) -> Example:
    ids = tuple(range(first, first + length))
    return Example(ids, (IGNORED,) * prompt + ids[prompt:], f"d.jsonl:{first}")


@pytest.mark.parametrize("seed", range(20))
def test_every_example_is_in_one_row_and_no_row_overflows(seed: int):
    lengths = np.random.default_rng(seed).integers(1, 65, 200)
    rows = best_fit(lengths, room=64)
    assert sorted(index for row in rows for index in row) == list(range(200))
    loads = sorted(int(lengths[row].sum()) for row in rows)
    assert loads[-1] <= 64
    assert loads[0] + loads[1] > 64  # no two rows would go into one


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([2, 3, 6, 4, 7], [[4, 1], [2, 3], [0]]),  # 7 and 6 open a row, 3 and 4 fill them, 2 needs a third
        ([7, 6, 3], [[0, 2], [1]]),  # and not where the most is left
        ([5, 5, 5, 5], [[0, 1], [2, 3]]),
        ([10, 10, 1], [[0], [1], [2]]),
        ([], []),
    ],
)
def test_each_goes_where_the_least_room_is_left_and_equal_lengths_keep_their_order(lengths: list, rows: list):
    assert best_fit(lengths, room=10) == rows


def test_many_examples_are_packed_in_little_time_and_with_little_waste():
    lengths = np.random.default_rng(0).integers(1, 800, 30_000)
    assert int(lengths.sum()) / (len(best_fit(lengths, room=1024)) * 1024) > 0.99


def test_rows_are_made_of_their_examples():
    examples = [example(2, 1), example(3, 5), example(4, 9)]
    assert [PackedRows(examples)[index] for index in range(3)] == [(one,) for one in examples]
    packed = PackedRows(examples, [[2, 0], [1]])
    assert len(packed) == 2
    assert list(packed) == [(examples[2], examples[0]), (examples[1],)]


def test_documents_of_a_row_start_again_and_their_first_labels_and_all_padding_are_ignored():
    batch = make_batch([(example(3, 10, prompt=1), example(2, 20)), (example(4, 30, prompt=2),)], np.array([8, 3]))
    np.testing.assert_array_equal(batch.ids, [[10, 11, 12, 20, 21], [30, 31, 32, 33, 0]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 0, 1], [0, 1, 2, 3, PADDING]])
    np.testing.assert_array_equal(batch.documents, [[0, 0, 0, 1, 1], [0, 0, 0, 0, PADDING]])
    np.testing.assert_array_equal(batch.labels, [[IGNORED, 11, 12, IGNORED, 21], [IGNORED, IGNORED, 32, 33, IGNORED]])
    np.testing.assert_array_equal(batch.samples, [8, 3])
    assert batch.n_trained == 5


def test_padding_does_not_hide_a_token_that_has_its_id():
    batch = make_batch([(Example((0, 0, 0), (0, 0, 0)),), (example(5),)], np.arange(2))
    np.testing.assert_array_equal(batch.labels[0], [IGNORED, 0, 0, IGNORED, IGNORED])
    assert batch.n_trained == 2 + 4


def test_packing_changes_where_documents_lie_and_not_what_they_are():
    rng = np.random.default_rng(1)
    examples = [
        example(int(n), int(first), prompt=1)
        for n, first in zip(rng.integers(2, 9, 40), range(0, 4000, 100), strict=True)
    ]
    members = best_fit([len(one.ids) for one in examples], room=16)
    assert len(members) < 40

    def documents(rows: PackedRows) -> list[tuple[list[int], list[int]]]:
        found = make_batch(list(rows), np.arange(len(rows))).each_document()
        return sorted((ids.tolist(), labels.tolist()) for ids, labels in found)

    assert documents(PackedRows(examples, members)) == documents(PackedRows(examples))


def test_stored_examples_come_back_as_they_were():
    given = [example(4, 3, prompt=2), example(2, 8), Example((2**31 - 1, 0), (IGNORED, 0), "x"), example(1, 5)]
    stored = Examples(given)
    assert list(stored) == given
    assert stored[-1] == given[-1]
    assert stored[1:3] == given[1:3]
    assert stored.lengths.tolist() == [4, 2, 2, 1]
    assert (stored.n_tokens, stored.n_trained) == (9, sum(one.n_trained for one in given))
    with pytest.raises(IndexError):
        stored[4]
    empty = Examples()
    assert (len(empty), empty.n_tokens, empty.n_trained, list(empty), empty.lengths.tolist()) == (0, 0, 0, [], [])


def test_the_content_tells_ids_labels_and_borders_apart():
    def content(*examples: Example) -> bytes:
        return b"|".join(Examples(examples).content())

    base = content(example(3), example(2, 7))
    assert base == content(Example(example(3).ids, example(3).labels, "elsewhere"), example(2, 7))
    others = [
        content(example(2, 7), example(3)),
        content(example(3, prompt=1), example(2, 7)),
        content(example(3), example(2, 8)),
        content(Example((1, 2, 3, 7), (1, 2, 3, 7)), Example((8,), (8,))),
    ]
    assert len({base, *others}) == 5
