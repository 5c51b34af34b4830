"""Cross entropy: a row by hand, finite differences, torch for comparison, logits that overflow a naive softmax."""

import math

import numpy as np
import pytest
from helpers.finite_differences import assert_is_gradient
from helpers.refusals import refuses

from llorch.ops.cross_entropy import IGNORED, cross_entropy, cross_entropy_backward, shifted

pytestmark = pytest.mark.usefixtures("arithmetic")

LABELS = np.array([2, IGNORED, 0, 6, IGNORED, 2])
SMOOTHINGS = (0.0, 0.1, 1.0)


def loss_and_grad(logits: np.ndarray, labels: np.ndarray, smoothing: float) -> tuple[float, np.ndarray]:
    """Mean loss and its gradient."""
    total, n_trained = cross_entropy(logits, labels, label_smoothing=smoothing)
    return total / n_trained, cross_entropy_backward(logits, labels, label_smoothing=smoothing, n_trained=n_trained)


def from_torch(logits: np.ndarray, labels: np.ndarray, smoothing: float) -> tuple[float, np.ndarray]:
    torch = pytest.importorskip("torch", reason="NOT RUN: torch is not installed")
    kernel, targets = torch.from_numpy(logits).requires_grad_(), torch.from_numpy(labels)
    loss = torch.nn.functional.cross_entropy(kernel, targets, ignore_index=IGNORED, label_smoothing=smoothing)
    loss.backward()
    assert kernel.grad is not None
    return loss.item(), kernel.grad.numpy()


def test_a_row_worked_by_hand():
    logits = np.log([[1.0, 2.0, 5.0]])  # probabilities 1/8, 2/8, 5/8
    loss, gradient = loss_and_grad(logits, np.array([1]), 0.25)
    nll, everywhere = math.log(4), (math.log(8) + math.log(4) + math.log(8 / 5)) / 3
    assert loss == pytest.approx(0.75 * nll + 0.25 * everywhere, rel=1e-15)
    np.testing.assert_allclose(gradient, [[1 / 8 - 1 / 12, 2 / 8 - 0.75 - 1 / 12, 5 / 8 - 1 / 12]], rtol=1e-14)


def test_shifted_gives_row_t_label_t_plus_1_and_masks_the_last_row():
    np.testing.assert_array_equal(shifted(np.array([7, 8, IGNORED, 9])), [8, IGNORED, 9, IGNORED])
    np.testing.assert_array_equal(shifted(np.array([7])), [IGNORED])


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_the_backward_is_the_gradient(rng, smoothing):
    logits = rng.normal(size=(6, 7)) * 3
    _, gradient = loss_and_grad(logits, LABELS, smoothing)
    assert_is_gradient(gradient, lambda x: loss_and_grad(x, LABELS, smoothing)[0], logits)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_loss_and_gradient_equal_torch_in_float64(rng, smoothing):
    logits = rng.normal(size=(6, 7)) * 3
    (loss, gradient), (expected, wanted) = (
        loss_and_grad(logits, LABELS, smoothing),
        from_torch(logits, LABELS, smoothing),
    )
    assert loss == pytest.approx(expected, rel=1e-14)
    np.testing.assert_allclose(gradient, wanted, rtol=0, atol=1e-15, strict=True)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_logits_of_plus_and_minus_300_neither_overflow_nor_underflow(smoothing, dtype):
    logits = np.array([[300, -300, 299, 0], [-300, -300, -300, -301], [300, 300, -300, 300]], dtype)
    labels = np.array([1, 3, 0])  # the first is surprised by 600
    loss, gradient = loss_and_grad(logits, labels, smoothing)
    expected, wanted = from_torch(logits.astype(np.float64), labels, smoothing)
    assert loss == pytest.approx(expected, rel=1e-6 if dtype is np.float32 else 1e-14)
    np.testing.assert_allclose(gradient, wanted, rtol=0, atol=1e-7 if dtype is np.float32 else 1e-15)
    assert gradient.dtype == dtype


def test_loss_of_many_equal_float32_logits_is_the_log_of_their_number():
    logits = np.full((2, 100_003), 300, np.float32)  # a float32 sum of as many exponentials would drift
    loss, gradient = loss_and_grad(logits, np.array([5, 100_002]), 0.0)
    assert loss == pytest.approx(math.log(100_003), rel=1e-7)
    np.testing.assert_allclose(gradient.sum(axis=-1), 0, atol=1e-6)


def test_ignored_rows_change_neither_loss_nor_gradient_and_get_none(rng):
    logits = rng.normal(size=(6, 7))
    loss, gradient = loss_and_grad(logits, LABELS, 0.1)
    ignored = LABELS == IGNORED
    again, same = loss_and_grad(np.where(ignored[:, None], 1e30, logits), LABELS, 0.1)
    assert again == loss
    np.testing.assert_array_equal(same, gradient)
    assert not gradient[ignored].any()
    assert gradient[~ignored].any(axis=-1).all()


def test_the_gradient_is_divided_by_the_tokens_of_the_whole_step(rng):
    logits = rng.normal(size=(6, 7))
    alone = cross_entropy_backward(logits, LABELS, label_smoothing=0.0, n_trained=4)
    in_a_step = cross_entropy_backward(logits, LABELS, label_smoothing=0.0, n_trained=40)
    np.testing.assert_allclose(in_a_step * 10, alone, rtol=1e-14)


@pytest.mark.parametrize("call", [cross_entropy, lambda *a, **k: cross_entropy_backward(*a, **k, n_trained=1)])
def test_rows_without_a_trained_token_are_an_error(call):
    with refuses(ValueError, where="cross entropy", expected="label", got=("3 rows", -100)):
        call(np.zeros((3, 7)), np.full(3, IGNORED), label_smoothing=0.0)


@pytest.mark.parametrize("label", [-1, 7, -101])
def test_label_outside_the_vocabulary_is_an_error(label):
    with refuses(ValueError, "from 0 to 6", "or -100", "row 1", where="cross entropy", got=label):
        cross_entropy(np.zeros((3, 7)), np.array([IGNORED, label, 2]), label_smoothing=0.0)
