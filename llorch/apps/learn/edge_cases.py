"""Edge cases that a lesson's page demands and no golden contains, such as a softmax of 1000.

The expected results were computed by hand, without an engine. The tolerance may be wide, because a wrong result is far
from the expected one.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.exercise import Exercise
from llorch.apps.learn.guard import guard_function
from llorch.runtime.errors import LearnerFault

_INT = np.int64
TWO = 0.7310586, 0.2689414  # softmax of two logits with the difference 1: 1 / (1 + e^-1), and the rest
# By exercise name: the reason of the edge case, the arguments, and the expected results.
EDGE_CASES: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "merge": (
        "the leftmost pair goes first if ranks are equal",
        {"ids": np.zeros(3, _INT), "merges": np.array([[0, 0, 1]], _INT), "ranks": np.zeros(1, _INT)},
        {"merged": [1, 0]},
    ),
    "attention_probs": (
        "exp(300) is infinite in float32",
        {"scores": np.array([[[300, 299, -np.inf]]], np.float32)},
        {"probs": [[[TWO[0], TWO[1], 0]]]},
    ),
    "swiglu": (
        "exp(200) is infinite in float32",
        {"gate": np.array([[-200, 200]], np.float32), "up": np.array([[5, 5]], np.float32)},
        {"y": [[0, 1000]]},
    ),
    "attention_output": (
        "a model may have the bias, although no built-in model has it",
        {"context": np.array([[1, 2]], np.float32), "o_proj": np.ones((1, 2), np.float32),
         "o_bias": np.full(1, 0.5, np.float32)},
        {"y": [[1 + 2 + 0.5]]},
    ),
    "softmax": (
        "exp(1000) is infinite", {"logits": np.array([1000, 999, -np.inf])},
        {"probabilities": [TWO[0], TWO[1], 0]},
    ),
    "keep_top_k": (
        "logits equal to the smallest of the k stay", {"logits": np.array([1.0, 3, 3, 2]), "k": 1},
        {"logits": [-np.inf, 3, 3, -np.inf]},
    ),
    "positions": (
        "five tokens are in the cache", {"n_before": 5, "n_new": 3},
        {"positions": [5, 6, 7]},
    ),
    "shifted": (
        "no token follows the last row", {"labels": np.array([5, 6, 7], _INT)},
        {"wanted": [6, 7, -100]},
    ),
    "cross_entropy": (
        "exp(200) is infinite in float32",
        {"logits": np.array([[200, 190, 0]], np.float32), "labels": np.array([1]), "label_smoothing": 0.0},
        {"loss_sum": 10 + 4.54e-5, "n_trained": 1},
    ),
    "cross_entropy_backward": (
        "exp(200) is infinite in float32",
        {"logits": np.array([[200, 190, 0]], np.float32), "labels": np.array([1]), "label_smoothing": 0.0,
         "n_trained": 1},
        {"d_logits": [[1 - 4.54e-5, 4.54e-5 - 1, 0]]},
    ),
    "swiglu_backward": (
        "exp(200) is infinite in float32",
        {"grad": np.ones((1, 2), np.float32), "gate": np.array([[-200, 200]], np.float32),
         "up": np.full((1, 2), 5, np.float32)},
        {"d_gate": [[0, 5]], "d_up": [[0, 200]]},
    ),
    "clip_by_norm": (
        "gradients below the limit stay as they are",
        {"grads": {"a": np.array([0.3, 0.4], np.float32)}, "max_norm": 1.0},
        {"clipped": [0.3, 0.4], "norm": 0.5},
    ),
}  # fmt: skip


def check_edge_cases(implementation: Implementation, exercises: Iterable[Exercise]) -> None:
    """Raise LearnerFault if a written exercise gives a wrong result at its edge case."""
    for exercise in exercises:
        if exercise.name not in implementation.written or exercise.name not in EDGE_CASES:
            continue
        reason, arguments, expected = EDGE_CASES[exercise.name]
        with np.errstate(all="ignore"):
            actual = exercise.results(guard_function(exercise, implementation.written[exercise.name])(**arguments))
        for name, correct in expected.items():
            if not np.allclose(actual[name], correct, rtol=0.02, atol=0.02):
                shown_arguments = ", ".join(f"{key}={_format_array(value)}" for key, value in arguments.items())
                sentence = f"{name} is {_format_array(actual[name])}, not {_format_array(correct)}: {reason}"
                raise LearnerFault(exercise.name, f"of {shown_arguments} {sentence}")


def _format_array(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_format_array(nested)}" for key, nested in value.items()) + "}"
    return np.array2string(np.asarray(value), precision=3, separator=", ")
