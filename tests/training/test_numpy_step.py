"""One optimizer step in NumPy: what its loss is the mean of, what is trained, and how much work it takes."""

import math

import numpy as np
import pytest
from builders.families import MICRO
from builders.random_adapters import EVERY, fresh, random_adapter
from helpers.refusals import refuses
from helpers.work_limit import work_limit

from llorch.files import Weights, open_weights
from llorch.judging.expectations.quantised_models import write_model
from llorch.lora.adapter import Adapter
from llorch.ops.precision import own_dtype_only
from llorch.runtime.builtin import builtin_path
from llorch.training.batch import IGNORED, PADDING, Batch, Example, trained_tokens
from llorch.training.numpy_step import loss_and_gradients

ALL = (*EVERY, "embed_tokens", "lm_head")


@pytest.fixture(params=["micro-llama3", "micro-qwen3"])
def weights(request: pytest.FixtureRequest) -> Weights:
    return open_weights(builtin_path(request.param)).astype(np.float64)


@pytest.fixture
def adapter(weights: Weights) -> Adapter:
    return random_adapter(weights.config, target_modules=ALL)


def batch(ids: np.ndarray, labels: np.ndarray) -> Batch:
    """Rows of one document each, without padding."""
    return Batch(ids, labels, np.tile(np.arange(ids.shape[1]), (len(ids), 1)), np.zeros_like(ids), np.arange(len(ids)))


def rows(rng: np.random.Generator, n: int, seq: int) -> Batch:
    """Random rows of which a different share is learned."""
    ids = rng.integers(0, 300, (n, seq))
    return batch(ids, np.where(np.arange(seq)[None, :] > rng.integers(0, seq - 1, (n, 1)), ids, IGNORED))


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], relative: float) -> None:
    assert list(actual) == list(expected)
    for name, gradient in actual.items():
        limit = relative * np.abs(expected[name]).max()
        np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=limit, err_msg=name, equal_nan=False)


def test_accumulated_batches_give_the_loss_and_gradients_of_one_batch(weights: Weights, adapter: Adapter, rng):
    whole = rows(rng, 4, 9)
    parts = [batch(whole.ids[i], whole.labels[i]) for i in (slice(1), slice(1, 4))]
    assert parts[0].n_trained != parts[1].n_trained  # else a mean of means would do
    loss, gradients = loss_and_gradients(weights, adapter, [whole], label_smoothing=0.1)
    again, accumulated = loss_and_gradients(weights, adapter, parts, label_smoothing=0.1)
    assert again == pytest.approx(loss, rel=1e-14)
    assert_same(accumulated, gradients, 1e-13)


def test_with_B_of_zeros_every_A_gets_exactly_0_and_every_B_something(weights: Weights, adapter: Adapter, rng):
    start = fresh(adapter)
    _, gradients = loss_and_gradients(weights, start, [rows(rng, 2, 9)], label_smoothing=0.0)
    for name, gradient in gradients.items():
        assert gradient.any() == name.endswith("lora_B"), name
    moved = {name: array - 0.1 * gradients[name] for name, array in start.flat().items()}
    _, second = loss_and_gradients(weights, start, [rows(rng, 2, 9)], label_smoothing=0.0, parameters=moved)
    assert all(gradient.any() for gradient in second.values())


def test_nothing_but_the_adapter_gets_a_gradient_and_neither_it_nor_the_base_changes(weights, adapter, rng):
    base = {name: weights.array(name).copy() for name in weights}
    own = {name: array.copy() for name, array in adapter.flat().items()}
    _, gradients = loss_and_gradients(weights, adapter, [rows(rng, 2, 9)], label_smoothing=0.0)
    assert {name: array.shape for name, array in gradients.items()} == {n: a.shape for n, a in own.items()}
    for name, array in base.items():
        np.testing.assert_array_equal(weights.array(name), array, err_msg=name)
    for name, array in own.items():
        np.testing.assert_array_equal(adapter.flat()[name], array, err_msg=name)


@pytest.mark.parametrize("use_dora", [False, True])
def test_float32_step_keeps_its_dtype_and_is_close_to_float64(weights: Weights, rng, use_dora: bool):
    adapter, step = random_adapter(weights.config, target_modules=ALL, use_dora=use_dora), [rows(rng, 2, 9)]
    narrow = weights.astype(np.float32)
    reference = loss_and_gradients(weights, adapter, step, label_smoothing=0.1)
    with own_dtype_only():
        loss, gradients = loss_and_gradients(narrow, adapter, step, label_smoothing=0.1)
    assert loss == pytest.approx(reference[0], rel=3e-6)
    assert {gradient.dtype for gradient in gradients.values()} == {np.dtype(np.float32)}
    for name, gradient in gradients.items():
        assert np.linalg.norm(gradient - reference[1][name]) / np.linalg.norm(reference[1][name]) < 2e-5, name


def test_a_packed_base_gives_the_gradients_of_the_decoded_one(tmp_path, rng):
    dense = open_weights(write_model("Q4_K", tmp_path)).astype(np.float64)
    adapter, step = random_adapter(dense.config, target_modules=ALL, use_dora=True), rows(rng, 1, 6)
    step = [batch(step.ids % dense.config.vocab_size, np.where(step.labels < 0, IGNORED, step.ids % 96))]
    loss, gradients = loss_and_gradients(dense.using(packed=True), adapter, step, label_smoothing=0.0)
    expected, wanted = loss_and_gradients(dense, adapter, step, label_smoothing=0.0)
    assert loss == pytest.approx(expected, rel=1e-12)
    assert_same(gradients, wanted, 1e-10)


def test_a_document_without_a_token_to_learn_is_an_error(weights: Weights, adapter: Adapter, rng):
    step = rows(rng, 2, 5)
    step.labels[1] = IGNORED
    with refuses(ValueError, expected="label", got=("5 rows", -100)):
        loss_and_gradients(weights, adapter, [step], label_smoothing=0.0)


@pytest.mark.parametrize("name", MICRO)
def test_a_float64_step_of_eight_times_the_tokens_runs_hardly_more_lines_of_python(name: str, rng):
    weights = open_weights(builtin_path(name)).astype(np.float64)
    adapter = random_adapter(weights.config, target_modules=ALL)

    def n_lines(n_tokens: int) -> int:
        batch = rows(rng, 2, n_tokens)
        loss_and_gradients(weights, adapter, [batch], label_smoothing=0.0)  # reads the file, checks new shapes
        with work_limit(math.inf) as work:
            loss_and_gradients(weights, adapter, [batch], label_smoothing=0.0)
        return work.n_lines

    assert n_lines(64) < 1.2 * n_lines(8)


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
