"""Edges: what a lesson's page asks of a part and no golden holds, such as a softmax of 1000.

What is right was worked out by hand and stands here, as no engine was asked. Nothing of precision is judged: a result
is this one or visibly another.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.exercise import Exercise
from llorch.apps.learn.guard import guarded
from llorch.runtime.errors import LearnerFault

_WHOLE = np.int64
TWO = 0.7310586, 0.2689414  # 1 / (1 + e^-1), and what is left of 1
# By the name of the part: what is special, its arguments, and what comes of them.
EDGES: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "merge": (
        "the leftmost pair goes first if ranks are equal",
        {"ids": np.zeros(3, _WHOLE), "merges": np.array([[0, 0, 1]], _WHOLE), "ranks": np.zeros(1, _WHOLE)},
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
        "no token follows the last row", {"labels": np.array([5, 6, 7], _WHOLE)},
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


def require_edges(implementation: Implementation, parts: Iterable[Exercise]) -> None:
    """Raise LearnerFault if a written part gives another result at an edge case."""
    for exercise in parts:
        if exercise.name not in implementation.written or exercise.name not in EDGES:
            continue
        what, given, wanted = EDGES[exercise.name]
        with np.errstate(all="ignore"):
            actual = exercise.results(guarded(exercise, implementation.written[exercise.name])(**given))
        for name, right in wanted.items():
            if not np.allclose(actual[name], right, rtol=0.02, atol=0.02):
                asked = ", ".join(f"{key}={_format_array(value)}" for key, value in given.items())
                said = f"{name} is {_format_array(actual[name])}, not {_format_array(right)}: {what}"
                raise LearnerFault(exercise.name, f"of {asked} {said}")


def _format_array(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_format_array(each)}" for key, each in value.items()) + "}"
    return np.array2string(np.asarray(value), precision=3, separator=", ")
