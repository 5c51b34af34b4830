"""When an op may widen: all operands or none, by the size of the largest; and what every op keeps."""

from functools import partial

import numpy as np
import pytest

from llorch.ops import attention
from llorch.ops.embedding import embedding, embedding_backward
from llorch.ops.linear import linear, linear_backward
from llorch.ops.precision import WIDE_LIMIT, widen
from llorch.ops.rms_norm import rms_norm, rms_norm_backward
from llorch.ops.rope import rope, rope_backward
from llorch.ops.swiglu import swiglu, swiglu_backward


def test_small_arrays_are_all_widened():
    small, scalar = widen(np.ones(WIDE_LIMIT, np.float32), np.ones((), np.float32))
    assert small.dtype == scalar.dtype == np.float64


@pytest.mark.parametrize("at", [0, 1])
def test_one_large_array_keeps_all_in_their_own_dtype(at):
    arrays = [np.ones(3, np.float32), np.ones(3, np.float32)]
    arrays[at] = np.ones(WIDE_LIMIT + 1, np.float32)
    assert all(a is b for a, b in zip(widen(*arrays), arrays, strict=True))


def test_widening_is_exact_and_copies(rng):
    array = rng.normal(size=7).astype(np.float32)
    (wide,) = widen(array)
    np.testing.assert_array_equal(wide.astype(np.float32), array, strict=True)
    assert not np.shares_memory(wide, array)


def test_float64_arrays_are_handed_back_as_they_are():
    array = np.ones(3)
    assert widen(array)[0] is array


@pytest.mark.usefixtures("arithmetic")
def test_every_op_keeps_the_dtype_and_does_not_change_its_inputs(rng, dtype):
    def some(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(dtype)

    q, k, v, scores, probs, x, y, gain = (
        some(*shape) for shape in ((5, 6, 4), (2, 5, 4), (2, 5, 4), (6, 5, 5), (6, 5, 5), (5, 24), (5, 24), (24,))
    )
    ids, weight, tables = np.array([4, 0, 4, 1, 2]), some(3, 24), np.ones((2, 5, 2))
    for op, *inputs in (
        (attention.attention_scores, q, k),
        (attention.attention_probs, scores),
        (attention.attention_context, probs, v),
        (attention.attention_scores_backward, scores, q, k),
        (attention.attention_probs_backward, scores, probs),
        (attention.attention_context_backward, x, probs, v),
        (embedding, ids, y),
        (partial(embedding_backward, vocab_size=9), x, ids),
        (linear, x, weight),
        (linear, x, weight, some(3)),
        (linear_backward, x, some(24, 3)),
        (partial(rms_norm, eps=1e-6), x, gain),
        (partial(rms_norm_backward, eps=1e-6), x, y, gain),
        (rope, q, *tables),
        (rope_backward, q, *tables),
        (swiglu, x, y),
        (swiglu_backward, x, y, y),
    ):
        before = [array.copy() for array in inputs]
        made = op(*inputs)
        for array in made if isinstance(made, tuple) else (made,):
            assert array.dtype == dtype, op
            assert not any(np.shares_memory(array, one) for one in inputs), op
        for array, old in zip(inputs, before, strict=True):
            np.testing.assert_array_equal(array, old)
