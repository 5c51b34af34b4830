"""Examples and batches: what counts as trained, and the documents of packed rows."""

import numpy as np
from helpers.refusals import refuses

from llorch.training.batch import IGNORED, PADDING, Batch, Example, trained_tokens


def test_the_first_token_of_an_example_is_never_trained():
    assert Example((5, 6, 7), (5, 6, 7)).n_trained == 2
    assert Example((5, 6, 7), (IGNORED, IGNORED, 7)).n_trained == 1


def test_a_batch_gives_its_documents_without_padding():
    batch = Batch(
        ids=np.array([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]]),
        labels=np.array([[IGNORED, 2, IGNORED, 4, 5], [IGNORED, 7, IGNORED, IGNORED, IGNORED]]),
        positions=np.array([[0, 1, 0, 1, 2], [0, 1, PADDING, PADDING, PADDING]]),
        documents=np.array([[0, 0, 1, 1, 1], [0, 0, PADDING, PADDING, PADDING]]),
        samples=np.array([7, 3]),
    )
    assert [(list(ids), list(labels)) for ids, labels in batch.each_document()] == [
        ([1, 2], [IGNORED, 2]),
        ([3, 4, 5], [IGNORED, 4, 5]),
        ([6, 7], [IGNORED, 7]),
    ]
    assert batch.n_trained == 4


def test_the_trained_tokens_of_a_step_are_those_of_all_its_batches_and_never_none():
    ids = np.array([[5, 6, 7, 0]])
    rest = np.array([[0, 1, 2, PADDING]]), np.array([[0, 0, 0, PADDING]]), np.array([0])
    one = Batch(ids, np.array([[IGNORED, 6, 7, IGNORED]]), *rest)
    none = Batch(ids, np.full_like(ids, IGNORED), *rest)
    assert trained_tokens([one, none, one]) == 4
    with refuses(ValueError, expected="token", got=(6, "ignored")):
        trained_tokens([none, none])
