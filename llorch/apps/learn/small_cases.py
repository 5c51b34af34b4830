"""Small cases: calls with a few readable numbers, which a learner can compute by hand.

The expected results were computed by hand, without an engine. The tolerance may be wide, because a wrong result is far
from the expected one. `tensor_table` has none: its smallest argument is the header of a file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llorch.apps.learn.exercise import Exercise
from llorch.apps.learn.function_calls import CallRecord, FunctionCall

Array = np.ndarray
MAX_ELEMENTS, MAX_ARRAYS = 12, 3  # printed elements of an array, and printed arrays of a dict
LOG_3 = 1.0986123  # the sigmoid of it is 3/4
TWO = 0.7310586, 0.2689414  # softmax of two logits with the difference 1: 1 / (1 + e^-1), and the rest


@dataclass(frozen=True)
class SmallCase:
    """A call of an exercise: its arguments, the right results, and what the case shows, if that is not obvious."""

    arguments: Mapping[str, Any]
    expected: Mapping[str, Any]
    reason: str = ""

    def describe_error(self, results: Mapping[str, Any]) -> str:
        """Describe the first wrong result, with the arguments; empty if all are right."""
        for name, correct in self.expected.items():
            actual = np.asarray(results[name])
            if actual.shape != np.shape(correct) or not np.allclose(actual, correct, rtol=0.02, atol=0.02):
                arguments = ", ".join(f"{key}={_format(value)}" for key, value in self.arguments.items())
                reason = f": {self.reason}" if self.reason else ""
                return f"of {arguments} {name} is {_format(actual)}, not {_format(correct)}{reason}"
        return ""


def find_small_error(exercise: Exercise, function: Any, record: CallRecord) -> str:
    """Describe the first wrong result of a guarded function in a small case; empty if all are right.

    A guarded function records its calls, but for a generator, whose tokens are recorded here.

    Raises:
        LearnerFault: The function raises, or returns an unusable value.
    """
    for case in SMALL_CASES.get(exercise.name, ()):
        arguments = dict(_tensors(case.arguments)) if exercise.on_torch else case.arguments
        with np.errstate(all="ignore"):
            returned = function(**arguments)
            results = exercise.results(take_tokens(returned, arguments) if exercise.streams else returned)
        if exercise.streams:
            expected = take_tokens(exercise.reference(**arguments), arguments)
            record.add(exercise.name, "", FunctionCall(arguments, (results["ids"],), (expected,)))
        if error := case.describe_error(results):
            return error
    return ""


def take_tokens(stream: Iterator[int], arguments: Mapping[str, Any]) -> Array:
    """Return the tokens of a generator; a wrong one may yield too many, so it stops one after the last."""
    return np.array([token for token, _ in zip(stream, range(arguments["max_tokens"] + 1), strict=False)], np.int64)


def _tensors(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    import torch  # only lesson 14 needs it

    for name, value in arguments.items():
        yield name, torch.from_numpy(value) if isinstance(value, Array) else value


def _format(value: object) -> str:
    if isinstance(value, Mapping) and len(value) > MAX_ARRAYS:
        return f"{{{len(value)} arrays}}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_format(nested)}" for key, nested in value.items()) + "}"
    if callable(value) or isinstance(value, str | bool) or value is None:
        return (value.__doc__ or "").strip().rstrip(".").lower() if callable(value) else str(value)
    text = np.array2string(
        np.asarray(value), separator=", ", threshold=MAX_ELEMENTS, edgeitems=3,
        formatter={"float_kind": lambda number: f"{number:.4g}", "int_kind": str},
    )  # fmt: skip
    return " ".join(text.split())


def _array(*values: Any) -> Array:
    return np.array(values, np.float32)


def _ids(*values: Any) -> Array:
    return np.array(values, np.int64)


def _blocks(n_bytes: int, fill: int, *start: int) -> Array:
    """Make one quantised block from its first bytes."""
    return np.array([[*start, *[fill] * (n_bytes - len(start))]], np.uint8)


def _chain_of(*probabilities: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> dict[str, Any]:
    """Make arguments of `distribution` without penalty and temperature."""
    logits = np.log(np.array(probabilities))
    settings = {"penalty": 1.0, "temperature": 1.0, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    return {"logits": logits, "history": _ids(0), **settings}


def next_id(new: Any) -> Array:
    """Prefer the last id + 1."""
    return np.eye(20)[int(np.asarray(new)[-1]) + 1]


ONE_TOKEN, NO_CACHE = _array([1, 2]), np.zeros((1, 0, 2), np.float32)
IDENTITY, ZEROS = np.eye(2, dtype=np.float32), np.zeros((2, 2), np.float32)
LAYER = {
    "attn_norm": _array(1, 1), "q_proj": IDENTITY, "k_proj": IDENTITY, "v_proj": IDENTITY, "o_proj": ZEROS,
    "ffn_norm": _array(1, 1), "gate_proj": IDENTITY, "up_proj": IDENTITY, "down_proj": ZEROS,
}  # fmt: skip
SMALL_CASES: Mapping[str, Sequence[SmallCase]] = {  # by name of the exercise
    "bfloat16_to_float32": (SmallCase({"bits": np.array([0x3F80, 0xC000], np.uint16)}, {"numbers": [1, -2]}),),
    "merge": (
        SmallCase(
            {"ids": _ids(1, 2, 3), "merges": _ids([1, 2, 4], [4, 3, 5]), "ranks": _ids(0, 1)}, {"merged": [5]},
        ),
        SmallCase(
            {"ids": np.zeros(3, np.int64), "merges": _ids([0, 0, 1]), "ranks": np.zeros(1, np.int64)},
            {"merged": [1, 0]}, "the leftmost pair goes first if ranks are equal",
        ),
    ),
    "embedding": (
        SmallCase({"ids": _ids(2, 0), "table": _array([0, 1], [2, 3], [4, 5])}, {"rows": [[4, 5], [0, 1]]}),
    ),
    "rms_norm": (
        SmallCase(
            {"x": _array([4, 2]), "weight": _array(2, 10), "eps": 15.0}, {"y": [[1.6, 4]]},
            "the mean square is 10, plus eps 25, the root 5",
        ),
    ),
    "frequencies": (SmallCase({"head_dim": 4, "theta": 100.0}, {"inv_freq": [1, 0.1]}),),
    "scale_frequencies": (
        SmallCase({"inv_freq": np.array([1.0, 0.5]), "factors": np.array([1.0, 2.0])}, {"inv_freq": [1, 0.25]}),
    ),
    "rope_tables": (
        SmallCase(
            {"positions": _ids(0, 2), "inv_freq": np.array([np.pi / 4, 0.0])},
            {"cos": [[1, 1], [0, 1]], "sin": [[0, 0], [1, 0]]},
        ),
    ),
    "rope": (
        SmallCase(
            {"x": _array([[1, 2, 3, 4]]), "cos": np.array([[0.0, 1.0]]), "sin": np.array([[1.0, 0.0]])},
            {"y": [[[-3, 2, 1, 4]]]}, "the pair (1, 3) is turned by 90 degrees, the pair (2, 4) is not",
        ),
    ),
    "linear": (
        SmallCase(
            {"x": _array([1, 2]), "weight": _array([1, 0], [1, 1], [0, 3]), "bias": _array(0, 0, 1)}, {"y": [[1, 3, 7]]}
        ),
    ),
    "qkv": (
        SmallCase(
            {
                "h": ONE_TOKEN, "q_proj": _array([1, 0], [0, 1], [1, 1], [0, 2]), "k_proj": _array([1, 1], [0, 1]),
                "v_proj": _array([2, 0], [0, 0]), "q_bias": _array(10, 20, 30, 40), "k_bias": _array(50, 60),
                "v_bias": _array(0, 1), "q_norm": None, "k_norm": None, "head_dim": 2, "eps": 1e-6,
            },
            {"q": [[[11, 22], [33, 44]]], "k": [[[53, 62]]], "v": [[[2, 1]]]},
        ),
        SmallCase(
            {
                "h": _array([3, 4]), "q_proj": IDENTITY, "k_proj": _array([0, 1], [1, 0]), "v_proj": IDENTITY,
                "q_bias": None, "k_bias": None, "v_bias": None, "q_norm": _array(1, 10), "k_norm": _array(10, 1),
                "head_dim": 2, "eps": 12.5,
            },
            {"q": [[[0.6, 8]]], "k": [[[8, 0.6]]], "v": [[[3, 4]]]},
            "q and k are divided by 5, the root of 12.5 + eps, and multiplied by their gain",
        ),
    ),
    "append": (
        SmallCase(
            {"past_k": _array([[1]]), "past_v": _array([[2]]), "k": _array([[3]], [[4]]), "v": _array([[5]], [[6]])},
            {"k": [[[1], [3], [4]]], "v": [[[2], [5], [6]]]},
        ),
    ),
    "attention_scores": (
        SmallCase(
            {"q": _array([[2, 0, 0, 0]], [[0, 2, 0, 0]]), "k": _array([[1, 1, 0, 0], [3, 0, 0, 0], [0, 5, 0, 0]])},
            {"scores": [[[1, 3, -np.inf], [1, 0, 5]]]}, "one key is of a cached token; the root of head_dim is 2",
        ),
    ),
    "attention_probs": (
        SmallCase({"scores": _array([[0, LOG_3, -np.inf]])}, {"probs": [[[0.25, 0.75, 0]]]}),
        SmallCase(
            {"scores": _array([[300, 299, -np.inf]])}, {"probs": [[[TWO[0], TWO[1], 0]]]},
            "exp(300) is infinite in float32",
        ),
        SmallCase(
            {"scores": _array([[300, -np.inf], [-299, -300]])}, {"probs": [[[1, 0], [*TWO]]]},
            "every row has its own maximum",
        ),
    ),
    "attention_context": (
        SmallCase({"probs": _array([[1, 0]], [[0.25, 0.75]]), "v": _array([[4], [8]])}, {"context": [[4, 7]]}),
    ),
    "attention_output": (
        SmallCase(
            {"context": _array([1, 2]), "o_proj": _array([1, 1]), "o_bias": _array(0.5)}, {"y": [[3.5]]},
            "a model may have the bias, although no built-in model has it",
        ),
    ),
    "swiglu": (
        SmallCase(
            {"gate": _array([0, LOG_3]), "up": _array([7, 2])}, {"y": [[0, 1.648]]},
            "the sigmoid of 1.0986 is 0.75",
        ),
        SmallCase(
            {"gate": _array([-200, 200]), "up": _array([5, 5])}, {"y": [[0, 1000]]}, "exp(200) is infinite in float32"
        ),
    ),
    "feed_forward": (
        SmallCase(
            {
                "h": _array([LOG_3]), "gate_proj": _array([1], [0]), "up_proj": _array([1], [5]),
                "down_proj": _array([2, 7]),
            },
            {"y": [[1.81]]}, "the gate is (1.0986, 0), and SiLU of it (0.824, 0)",
        ),
    ),
    "block": (
        SmallCase(
            {
                "x": ONE_TOKEN, "w": LAYER, "cos": np.ones((1, 1)), "sin": np.zeros((1, 1)), "past_k": NO_CACHE,
                "past_v": NO_CACHE, "head_dim": 2, "eps": 1e-6,
            },
            {"x": [[1, 2]], "k": [[[0.632, 1.265]]], "v": [[[0.632, 1.265]]]},
            "o_proj and down_proj are 0, so that nothing is added to x",
        ),
    ),
    "logits": (
        SmallCase(
            {
                "x": _array([3, 4]), "final_norm": _array(1, 1), "lm_head": None,
                "embed_tokens": _array([1, 0], [0, 1], [1, 1]), "eps": 12.5,
            },
            {"logits": [[0.6, 0.8, 1.4]]}, "the normalised row is (0.6, 0.8)",
        ),
    ),
    "short_conv": (
        SmallCase(
            {"x": _array([LOG_3]), "kernel": _array([2, 1]), "state": _array([0])}, {"y": [[0.824]]},
            "the newest token has the last tap; SiLU of 1.0986 is 0.824",
        ),
    ),
    "l2_norm": (SmallCase({"x": _array([[3, 4]])}, {"y": [[[0.6, 0.8]]]}),),
    "log_decay": (
        SmallCase(
            {"a": _array([LOG_3]), "dt_bias": _array(-LOG_3), "decay": _array(-2)}, {"g": [[-1.386]]},
            "softplus of 0 is the logarithm of 2",
        ),
    ),
    "delta_rule": (
        SmallCase(
            {
                "q": _array([[2, 0, 0, 0]]), "k": _array([[1, 0, 0, 0]]), "v": _array([[5]]), "beta": _array([0.5]),
                "g": _array([0]), "state": _array([[1], [0], [0], [0]]),
            },
            {"out": [[[3]]], "state": [[[3], [0], [0], [0]]]},
            "the memory holds 1, half of the correction 5 - 1 is written, and q is divided by 2, the root of key_dim",
        ),
    ),
    "top_k": (
        SmallCase({"scores": _array([0.1, 0.7, 0.2]), "k": 2}, {"ids": [[1, 2]]}),
        SmallCase(
            {"scores": _array([0.1, 0.3, 0.3, 0.3]), "k": 2}, {"ids": [[1, 2]]}, "among equals the lowest id is first"
        ),
    ),
    "topk_weights": (
        SmallCase(
            {"probs": _array([0.1, 0.6, 0.3]), "ids": _ids([1, 2]), "normalised": True}, {"weights": [[0.667, 0.333]]}
        ),
        SmallCase(
            {"probs": _array([0.1, 0.6, 0.3]), "ids": _ids([1, 2]), "normalised": False}, {"weights": [[0.6, 0.3]]}
        ),
    ),
    "expert_outputs": (
        SmallCase(
            {
                "h": _array([LOG_3]), "ids": _ids([1]), "gate_proj": _array([[9]], [[1]]),
                "up_proj": _array([[9]], [[1]]),
                "down_proj": _array([[9]], [[2]]),
            },
            {"outs": [[[1.81]]]}, "expert 1 is the second",
        ),
    ),
    "mixed": (
        SmallCase(
            {"outs": _array([[10], [20]]), "weights": _array([0.5, 0.25]), "shared": None, "gate": None}, {"y": [[10]]}
        ),
    ),
    "last_row": (SmallCase({"logits": _array([1, 2], [3, 4])}, {"row": [3, 4]}),),
    "argmax": (
        SmallCase({"row": _array(1, 5, 5)}, {"id": 1}, "the lowest id wins a tie"),
        SmallCase({"row": _array(1, 2, -5)}, {"id": 1}),
        SmallCase({"row": _array(-3, -1, -2)}, {"id": 1}),
        SmallCase({"row": _array(1, 2, 5)}, {"id": 2}),
    ),
    "softmax": (
        SmallCase({"logits": np.log([0.5, 0.3, 0.2])}, {"probabilities": [0.5, 0.3, 0.2]}),
        SmallCase(
            {"logits": np.array([1000, 999, -np.inf])}, {"probabilities": [TWO[0], TWO[1], 0]}, "exp(1000) is infinite"
        ),
    ),
    "penalise": (
        SmallCase(
            {"logits": np.array([2.0, -2.0, 1.0]), "history": _ids(0, 1, 0), "penalty": 2.0}, {"logits": [1, -4, 1]},
            "token 0 occurs twice and counts once",
        ),
    ),
    "keep_top_k": (
        SmallCase({"logits": np.array([1.0, 3, 2]), "k": 2}, {"logits": [-np.inf, 3, 2]}),
        SmallCase(
            {"logits": np.array([1.0, 3, 3, 2]), "k": 1}, {"logits": [-np.inf, 3, 3, -np.inf]},
            "logits equal to the smallest of the k stay",
        ),
        SmallCase({"logits": np.array([1.0, 3, 2]), "k": 0}, {"logits": [1, 3, 2]}, "0 keeps all"),
        SmallCase({"logits": np.array([1.0, 3, 2]), "k": 9}, {"logits": [1, 3, 2]}, "there are fewer than k"),
    ),
    "keep_top_p": (
        SmallCase(
            {"logits": np.log([0.3, 0.5, 0.2]), "p": 0.6}, {"logits": [*np.log([0.3, 0.5]), -np.inf]},
            "the probabilities are 0.3, 0.5 and 0.2; 0.5 + 0.3 crosses 0.6",
        ),
    ),
    "keep_min_p": (
        SmallCase(
            {"logits": np.log([0.6, 0.35, 0.05]), "min_p": 0.5}, {"logits": [*np.log([0.6, 0.35]), -np.inf]},
            "the probabilities are 0.6, 0.35 and 0.05; the limit is 0.3",
        ),
        SmallCase(
            {"logits": np.array([-1.0, 0.0]), "min_p": 1.0}, {"logits": [-np.inf, 0]}, "the likeliest token stays"
        ),
    ),
    "distribution": (
        SmallCase(
            {
                "logits": np.array([4.0, 2.0, 0.0]), "history": _ids(2), "penalty": 1.0, "temperature": 2.0, "top_k": 2,
                "top_p": 1.0, "min_p": 0.0,
            },
            {"probabilities": [TWO[0], TWO[1], 0]}, "divided by 2 the logits are 2, 1 and 0, and top-k keeps two",
        ),
        SmallCase(
            _chain_of(0.5, 0.26, 0.14, 0.1, top_p=0.8, min_p=0.25), {"probabilities": [0.5556, 0.2889, 0.1556, 0]},
            "the probabilities are 0.5, 0.26, 0.14 and 0.1; top-p keeps three of them, and then min-p, too",
        ),
        SmallCase(
            _chain_of(0.4, 0.3, 0.2, 0.1, top_k=3, top_p=0.75), {"probabilities": [0.5714, 0.4286, 0, 0]},
            "the probabilities are 0.4, 0.3, 0.2 and 0.1; of top-k's three top-p keeps two",
        ),
    ),
    "positions": (
        SmallCase({"n_before": 5, "n_new": 3}, {"positions": [5, 6, 7]}, "five tokens are in the cache"),
    ),
    "generate": (SmallCase({"step": next_id, "prompt": _ids(1, 2), "max_tokens": 3}, {"ids": [3, 4, 5]}),),
    "q8_0": (
        SmallCase(
            {"blocks": _blocks(34, 0, 0, 56, 2, 254)}, {"values": [[1, -1, *[0] * 30]]},
            "the first two bytes are the float16 0.5; the codes are 2 and -2",
        ),
    ),
    "q4_0": (
        SmallCase(
            {"blocks": _blocks(18, 0x88, 0, 56, 0x6A)}, {"values": [[1, *[0] * 15, -1, *[0] * 15]]},
            "the first two bytes are the float16 0.5; 106 has the codes 10 (element 0) and 6 (element 16)",
        ),
    ),
    "torch_rms_norm": (
        SmallCase(
            {"x": _array([4, 2]), "weight": _array(2, 10), "eps": 15.0}, {"y": [[1.6, 4]]},
            "the mean square is 10, plus eps 25, the root 5",
        ),
    ),
    "torch_rope": (
        SmallCase(
            {"x": _array([[[1, 2, 3, 4]]]), "cos": np.array([[[0.0, 1.0]]]), "sin": np.array([[[1.0, 0.0]]])},
            {"y": [[[[-3, 2, 1, 4]]]]}, "the pair (1, 3) is turned by 90 degrees, the pair (2, 4) is not",
        ),
        SmallCase(
            {
                "x": _array([[[1, 3]]], [[[1, 3]]]), "cos": np.array([[[1.0]], [[0.0]]]),
                "sin": np.array([[[0.0]], [[1.0]]]),
            },
            {"y": [[[[1, 3]]], [[[-3, 1]]]]}, "each sequence of the batch has its own tables",
        ),
    ),
    "lora_scaling": (
        SmallCase(
            {"r": 8, "lora_alpha": 16.0, "own_r": None, "own_alpha": None, "use_rslora": False}, {"scaling": 2}
        ),
        SmallCase({"r": 8, "lora_alpha": 16.0, "own_r": 4, "own_alpha": None, "use_rslora": True}, {"scaling": 8}),
    ),
    "lora_delta": (
        SmallCase(
            {"x": _array([1, 2]), "lora_A": _array([1, 1]), "lora_B": _array([1], [2]), "scaling": 10.0},
            {"delta": [[30, 60]]},
        ),
    ),
    "masked_labels": (
        SmallCase({"ids": _ids(5, 6, 7), "learned": np.array([False, True, True])}, {"labels": [-100, 6, 7]}),
    ),
    "shifted": (SmallCase({"labels": _ids(5, 6, 7)}, {"wanted": [6, 7, -100]}, "no token follows the last row"),),
    "cross_entropy": (
        SmallCase(
            {"logits": _array([0, 0], [0, LOG_3]), "labels": _ids(-100, 1), "label_smoothing": 0.0},
            {"loss_sum": 0.2877, "n_trained": 1}, "row 0 does not count; row 1 has the probability 0.75",
        ),
        SmallCase(
            {"logits": _array([LOG_3, 0]), "labels": _ids(0), "label_smoothing": 0.0},
            {"loss_sum": 0.2877, "n_trained": 1}, "token 0 is a label, too",
        ),
        SmallCase(
            {"logits": _array([200, 190, 0]), "labels": _ids(1), "label_smoothing": 0.0},
            {"loss_sum": 10 + 4.54e-5, "n_trained": 1}, "exp(200) is infinite in float32",
        ),
    ),
    "cross_entropy_backward": (
        SmallCase(
            {"logits": _array([0, LOG_3], [0, 0]), "labels": _ids(1, -100), "label_smoothing": 0.0, "n_trained": 2},
            {"d_logits": [[0.125, -0.125], [0, 0]]}, "row 0 has the probabilities 0.25 and 0.75; row 1 does not count",
        ),
        SmallCase(
            {"logits": _array([0, LOG_3]), "labels": _ids(1), "label_smoothing": 0.2, "n_trained": 1},
            {"d_logits": [[0.15, -0.15]]}, "the probabilities are 0.25 and 0.75, the target is 0.1 and 0.9",
        ),
        SmallCase(
            {"logits": _array([200, 190, 0]), "labels": _ids(1), "label_smoothing": 0.0, "n_trained": 1},
            {"d_logits": [[1 - 4.54e-5, 4.54e-5 - 1, 0]]}, "exp(200) is infinite in float32",
        ),
    ),
    "lora_backward": (
        SmallCase(
            {
                "grad": _array([1]), "x": _array([2]), "weight": _array([3]), "lora_A": _array([4]),
                "lora_B": _array([5]), "scaling": 10.0,
            },
            {"d_x": [[203]], "d_A": [[100]], "d_B": [[80]]}, "y = 3 x + 10 * 5 * 4 * x",
        ),
    ),
    "swiglu_backward": (
        SmallCase({"grad": _array([1]), "gate": _array([0]), "up": _array([6])}, {"d_gate": [[3]], "d_up": [[0]]}),
        SmallCase(
            {"grad": _array([1]), "gate": _array([LOG_3]), "up": _array([1])},
            {"d_gate": [[0.956]], "d_up": [[0.824]]}, "the sigmoid of 1.0986 is 0.75",
        ),
        SmallCase(
            {"grad": _array([1, 1]), "gate": _array([-200, 200]), "up": _array([5, 5])},
            {"d_gate": [[0, 5]], "d_up": [[0, 200]]}, "exp(200) is infinite in float32",
        ),
    ),
    "rms_norm_backward": (
        SmallCase(
            {"grad": _array([10, 0]), "x": _array([3, 4]), "weight": _array(1, 1), "eps": 12.5},
            {"d_x": [[1.64, -0.48]]}, "the root is 5: 10 / 5 - 3 * 30 / (2 * 125) and -4 * 30 / (2 * 125)",
        ),
    ),
    "attention_context_backward": (
        SmallCase(
            {"grad": _array([1, 2]), "probs": _array([[1]], [[1]]), "v": _array([[3]])},
            {"d_probs": [[[3]], [[6]]], "d_v": [[[3]]]}, "two query heads read the value",
        ),
    ),
    "attention_probs_backward": (
        SmallCase(
            {"grad": _array([[8, 0]]), "probs": _array([[0.25, 0.75]])}, {"d_scores": [[[1.5, -1.5]]]},
            "the sum of grad * probs is 2",
        ),
    ),
    "attention_scores_backward": (
        SmallCase(
            {"grad": _array([[2]]), "q": _array([[1, 0, 0, 0]]), "k": _array([[3, 0, 0, 0]])},
            {"d_q": [[[3, 0, 0, 0]]], "d_k": [[[1, 0, 0, 0]]]}, "the root of head_dim is 2",
        ),
    ),
    "rope_backward": (
        SmallCase(
            {"grad": _array([[-3, 2, 1, 4]]), "cos": np.array([[0.0, 1.0]]), "sin": np.array([[1.0, 0.0]])},
            {"d_x": [[[1, 2, 3, 4]]]},
        ),
    ),
    "residual_backward": (SmallCase({"grad": _array([1, 2]), "through": _array([10, 20])}, {"d_x": [[11, 22]]}),),
    "clip_by_norm": (
        SmallCase({"grads": {"a": _array(3, 4)}, "max_norm": 1.0}, {"clipped": [0.6, 0.8], "norm": 5}),
        SmallCase(
            {"grads": {"a": _array(0.3, 0.4)}, "max_norm": 1.0}, {"clipped": [0.3, 0.4], "norm": 0.5},
            "gradients below the limit stay as they are",
        ),
    ),
    "adamw_step": (
        SmallCase(
            {
                "param": _array(10), "grad": _array(2), "m": _array(0), "v": _array(0), "step": 1, "lr": 0.5,
                "beta1": 0.9, "beta2": 0.75, "eps": 0.0, "weight_decay": 0.4,
            },
            {"param": [7.5], "m": [0.2], "v": [1]}, "the decay is 2; corrected, m is 2 and v is 4, and their step 0.5",
        ),
        SmallCase(
            {
                "param": _array(10), "grad": _array(2), "m": _array(0.2), "v": _array(1), "step": 2, "lr": 0.5,
                "beta1": 0.9, "beta2": 0.75, "eps": 0.0, "weight_decay": 0.0,
            },
            {"param": [9.5], "m": [0.38], "v": [1.75]}, "corrected by 1 - 0.9^2 and 1 - 0.75^2, m is 2 and v is 4",
        ),
    ),
    "learning_rate": (
        SmallCase(
            {"step": 1, "schedule": "linear", "peak": 8.0, "warmup_steps": 4, "total_steps": 8}, {"rate": 2}
        ),
        SmallCase(
            {"step": 5, "schedule": "linear", "peak": 8.0, "warmup_steps": 4, "total_steps": 8}, {"rate": 6}
        ),
        SmallCase(
            {"step": 0, "schedule": "cosine", "peak": 8.0, "warmup_steps": 0, "total_steps": 8}, {"rate": 8},
            "without a warm-up the first step has the peak",
        ),
    ),
    "accumulated": (
        SmallCase(
            {"loss_sums": np.array([6.0, 2.0]), "n_trained": _ids(3, 1), "grad_sums": _array([3], [5])},
            {"loss": 2, "gradient": [2]},
        ),
    ),
    "merged": (
        SmallCase(
            {"weight": _array([1, 1]), "lora_A": _array([2, 3]), "lora_B": _array([1]), "scaling": 10.0},
            {"weight": [[21, 31]]},
        ),
    ),
    "interleave": (SmallCase({"rows": _array([0], [1], [2], [3]), "n_heads": 1}, {"rows": [[0], [2], [1], [3]]}),),
    "gguf_alpha": (
        SmallCase({"lora_alpha": 8.0, "scalings": np.array([2.0, 4.0]), "ranks": _ids(8, 4)}, {"alpha": 16}),
        SmallCase(
            {"lora_alpha": 8.0, "scalings": np.array([2.0, 2.0]), "ranks": _ids(8, 4)}, {"alpha": 0},
            "no alpha fits both",
        ),
    ),
}  # fmt: skip
