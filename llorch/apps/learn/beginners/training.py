"""Mistakes of beginners in training: lessons 15 to 20."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from llorch.apps.learn.exercise import Call
from llorch.apps.learn.exercises import training as right
from llorch.ops.cross_entropy import IGNORED, log_softmax

Array = np.ndarray
Arrays = Mapping[str, Array]


def scaling_multiplied(
    r: int, lora_alpha: float, own_r: int | None, own_alpha: float | None, use_rslora: bool
) -> float:
    """alpha was multiplied by r; it is alpha / r."""
    rank, alpha = r if own_r is None else own_r, lora_alpha if own_alpha is None else own_alpha
    return alpha * rank


def scaling_always_root(
    r: int, lora_alpha: float, own_r: int | None, own_alpha: float | None, use_rslora: bool
) -> float:
    """alpha was always divided by sqrt(r); only a rank-stabilised adapter does that."""
    return right.lora_scaling(r, lora_alpha, own_r, own_alpha, True)


def scaling_root_of_quotient(
    r: int, lora_alpha: float, own_r: int | None, own_alpha: float | None, use_rslora: bool
) -> float:
    """The root was taken of alpha / r; a rank-stabilised adapter has alpha / sqrt(r)."""
    scaling = right.lora_scaling(r, lora_alpha, own_r, own_alpha, False)
    return math.sqrt(scaling) if use_rslora else scaling


def scaling_as_whole_number(
    r: int, lora_alpha: float, own_r: int | None, own_alpha: float | None, use_rslora: bool
) -> float:
    """alpha was divided with //, which drops the fraction; use /."""
    rank, alpha = r if own_r is None else own_r, lora_alpha if own_alpha is None else own_alpha
    return alpha // (rank**0.5 if use_rslora else rank)


def scaling_without_patterns(
    r: int, lora_alpha: float, own_r: int | None, own_alpha: float | None, use_rslora: bool
) -> float:
    """own_r and own_alpha were not used; they replace r and lora_alpha if they are not None."""
    return right.lora_scaling(r, lora_alpha, None, None, use_rslora)


def own_rank_ignored(r: int, lora_alpha: float, own_r: int | None, own_alpha: float | None, use_rslora: bool) -> float:
    """own_r was not used; it replaces r if it is not None."""
    return right.lora_scaling(r, lora_alpha, None, own_alpha, use_rslora)


def own_alpha_only_with_own_rank(
    r: int, lora_alpha: float, own_r: int | None, own_alpha: float | None, use_rslora: bool
) -> float:
    """own_alpha was used only if own_r is given, too; each of the two replaces its own setting."""
    return right.lora_scaling(r, lora_alpha, own_r, own_alpha if own_r is not None else None, use_rslora)


def own_rank_only_with_own_alpha(
    r: int, lora_alpha: float, own_r: int | None, own_alpha: float | None, use_rslora: bool
) -> float:
    """own_r was used only if own_alpha is given, too; each of the two replaces its own setting."""
    return right.lora_scaling(r, lora_alpha, own_r if own_alpha is not None else None, own_alpha, use_rslora)


def scaling_only_with_patterns(
    r: int, lora_alpha: float, own_r: int | None, own_alpha: float | None, use_rslora: bool
) -> float:
    """own_r was used for alpha, too: each of the two replaces its own setting."""
    return right.lora_scaling(r, lora_alpha, own_r, own_r, use_rslora)


def factors_in_reading_order(x: Array, lora_A: Array, lora_B: Array, scaling: float) -> Array:
    """x was multiplied by B, then by A; rows go through A first: x A^T B^T."""
    return scaling * x @ lora_B @ lora_A


def delta_averaged_over_rank(x: Array, lora_A: Array, lora_B: Array, scaling: float) -> Array:
    """The product was divided by the rank; the scale has done that already."""
    return right.our_lora_delta(x, lora_A, lora_B, scaling=scaling / len(lora_A))


def labels_of_prompt(ids: Array, learned: Array) -> Array:
    """The other tokens were labelled; learned tokens keep their id, and the others get -100."""
    return np.where(learned, IGNORED, ids)


def _labels_masked_with(value: int) -> Call:
    def wrong(ids: Array, learned: Array) -> Array:
        return np.where(learned, ids, value)

    wrong.__name__ = f"masked_with_{value}".replace("-", "minus_")
    wrong.__doc__ = f"Tokens that do not count got the label {value}; it is -100, which is no token id."
    return wrong


def wanted_wraps_around(labels: Array) -> Array:
    """The last row wants the first label, as np.roll gives it; no token follows, so it is -100."""
    return np.roll(labels, -1)


def wanted_of_the_token_before(labels: Array) -> Array:
    """The labels were shifted the other way; row i wants label i + 1."""
    return np.concatenate([[IGNORED], labels[:-1]])


def wanted_wraps_backwards(labels: Array) -> Array:
    """The labels were shifted the other way; row i wants label i + 1."""
    return np.roll(labels, 1)


def last_label_repeated(labels: Array) -> Array:
    """The last row wants the last label again; no token follows, so it is -100."""
    return np.concatenate([labels[1:], labels[-1:]])


def last_label_zero(labels: Array) -> Array:
    """The last row wants token 0; no token follows, so it is -100."""
    return np.concatenate([labels[1:], np.zeros(1, labels.dtype)])


def _losses(logits: Array, labels: Array, label_smoothing: float, *, rows: Array | None = None) -> Array:
    rows = np.nonzero(labels != IGNORED)[0] if rows is None else rows
    log_p = log_softmax(logits[rows]).astype(np.float64)
    nll = -log_p[np.arange(len(rows)), labels[rows]]
    return (1 - label_smoothing) * nll - label_smoothing * log_p.mean(axis=-1)


def loss_as_mean(logits: Array, labels: Array, label_smoothing: float) -> tuple[float, int]:
    """The mean of the losses was returned; return their sum."""
    losses = _losses(logits, labels, label_smoothing)
    return losses.mean(), len(losses)


def loss_over_all_rows(logits: Array, labels: Array, label_smoothing: float) -> tuple[float, int]:
    """Rows with the label -100 were in the loss: -100 picked the number 100 from the end."""
    losses = _losses(logits, labels, label_smoothing, rows=np.arange(len(labels)))
    return losses.sum(), int((labels != IGNORED).sum())


def loss_and_count_over_all_rows(logits: Array, labels: Array, label_smoothing: float) -> tuple[float, int]:
    """Rows with the label -100 were in the loss and in the count; they are in neither."""
    losses = _losses(logits, labels, label_smoothing, rows=np.arange(len(labels)))
    return losses.sum(), len(labels)


def ignored_rows_as_token_zero(logits: Array, labels: Array, label_smoothing: float) -> tuple[float, int]:
    """Rows with the label -100 were in the loss as token 0."""
    losses = _losses(logits, np.maximum(labels, 0), label_smoothing)
    return losses.sum(), int((labels != IGNORED).sum())


def _but_last(logits: Array, labels: Array, label_smoothing: float) -> tuple[float, int]:
    """All rows but the last were counted; only those with a label count."""
    return _losses(logits, labels, label_smoothing).sum(), len(labels) - 1


def _loss_with_small_number(small: float) -> Call:
    def wrong(logits: Array, labels: Array, label_smoothing: float) -> tuple[float, int]:
        rows = np.nonzero(labels != IGNORED)[0]
        log_p = np.log(np.exp(log_softmax(logits[rows])) + small)
        nll = -log_p[np.arange(len(rows)), labels[rows]]
        losses = (1 - label_smoothing) * nll - label_smoothing * log_p.mean(axis=-1)
        return float(losses.sum()), len(rows)

    wrong.__name__ = f"{small:g}_added_to_probabilities"
    wrong.__doc__ = (
        f"{small:g} was added to the probabilities before the logarithm, which changes the loss of unlikely tokens;"
        " subtract the logarithm of the sum from the logits instead."
    )
    return wrong


SMALL_NUMBERS = tuple(map(_loss_with_small_number, (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10)))


def loss_of_all_labels_in_all_rows(logits: Array, labels: Array, label_smoothing: float) -> tuple[float, int]:
    """log_p[:, labels] takes every label in every row; take each row's own label: log_p[np.arange(n), labels]."""
    rows = np.nonzero(labels != IGNORED)[0]
    log_p = log_softmax(logits[rows]).astype(np.float64)
    losses = -(1 - label_smoothing) * log_p[:, labels[rows]] - label_smoothing * log_p.mean(axis=-1, keepdims=True)
    return float(losses.sum()), len(rows)


def loss_of_probabilities(logits: Array, labels: Array, label_smoothing: float) -> tuple[float, int]:
    """1 minus the probability was taken; the loss is minus its logarithm."""
    rows = np.nonzero(labels != IGNORED)[0]
    probabilities = np.exp(log_softmax(logits[rows]))[np.arange(len(rows)), labels[rows]]
    return float((1 - probabilities).sum()), len(rows)


def _smoothed(logits: Array, labels: Array, label_smoothing: float, share: Any) -> tuple[float, int]:
    """Take the smoothed loss with another share: `share(nll, log_p, e, vocab)`."""
    rows = np.nonzero(labels != IGNORED)[0]
    log_p = log_softmax(logits[rows]).astype(np.float64)
    nll = -log_p[np.arange(len(rows)), labels[rows]]
    return float(share(nll, log_p, label_smoothing, logits.shape[1]).sum()), len(rows)


def smoothing_to_other_tokens(logits: Array, labels: Array, label_smoothing: float) -> tuple[float, int]:
    """e was spread over the other tokens only; it is spread over the whole vocabulary."""
    return _smoothed(
        logits, labels, label_smoothing, lambda nll, p, e, n: (1 - e) * nll - e * (p.sum(-1) + nll) / (n - 1)
    )


def smoothing_not_divided(logits: Array, labels: Array, label_smoothing: float) -> tuple[float, int]:
    """e was given to every token of the vocabulary; each gets e / vocab."""
    return _smoothed(logits, labels, label_smoothing, lambda nll, p, e, n: (1 - e) * nll - e * p.sum(-1))


def smoothing_alone(logits: Array, labels: Array, label_smoothing: float) -> tuple[float, int]:
    """The loss was multiplied by 1 - e, and the uniform part is missing."""
    return _smoothed(logits, labels, label_smoothing, lambda nll, p, e, n: (1 - e) * nll)


def _d_logits(logits: Array, labels: Array, n_trained: float, change: Any, *, rows: Array | None = None) -> Array:
    """Make a gradient by the logits; `change(probabilities, one_hot)` gives the rows in the loss."""
    rows = np.nonzero(labels != IGNORED)[0] if rows is None else rows
    probabilities = np.exp(log_softmax(logits[rows])).astype(np.float64)
    one_hot = np.zeros_like(probabilities)
    one_hot[np.arange(len(rows)), labels[rows]] = 1
    d_logits = np.zeros(logits.shape)
    d_logits[rows] = change(probabilities, one_hot) / n_trained
    return d_logits.astype(logits.dtype)


def d_logits_not_divided(logits: Array, labels: Array, label_smoothing: float, n_trained: int) -> Array:
    """The gradient was not divided by n_trained: the loss is a mean."""
    return _d_logits(logits, labels, 1, lambda p, y: p - (1 - label_smoothing) * y - label_smoothing / p.shape[1])


def d_logits_smoothing_of_label_only(logits: Array, labels: Array, label_smoothing: float, n_trained: int) -> Array:
    """The label's share was reduced to 1 - e, and e / vocab of the other tokens is missing."""
    return _d_logits(logits, labels, n_trained, lambda p, y: p - (1 - label_smoothing) * y)


def d_logits_smoothing_added(logits: Array, labels: Array, label_smoothing: float, n_trained: int) -> Array:
    """e / vocab was subtracted, and the label's share stayed 1; it is 1 - e."""
    return _d_logits(logits, labels, n_trained, lambda p, y: p - y - label_smoothing / p.shape[1])


def d_logits_smoothing_twice(logits: Array, labels: Array, label_smoothing: float, n_trained: int) -> Array:
    """The whole gradient was multiplied by 1 - e; only the label's share is."""
    return _d_logits(logits, labels, n_trained, lambda p, y: (1 - label_smoothing) * (p - y))


def d_logits_of_ignored_rows(logits: Array, labels: Array, label_smoothing: float, n_trained: int) -> Array:
    """Rows with the label -100 got a gradient; their gradient is 0."""
    target = right.our_cross_entropy_backward(logits, labels, label_smoothing=label_smoothing, n_trained=n_trained)
    ignored = labels == IGNORED
    wrong = np.exp(log_softmax(logits[ignored])).astype(np.float64)
    wrong[np.arange(ignored.sum()), IGNORED] -= 1
    target[ignored] = (wrong / n_trained).astype(target.dtype)
    return target


def d_logits_divided_by_rows_in_loss(logits: Array, labels: Array, label_smoothing: float, n_trained: int) -> Array:
    """The gradient was divided by the learned rows of this call; n_trained counts those of the whole step."""
    n_rows = int((labels != IGNORED).sum())
    return right.our_cross_entropy_backward(logits, labels, label_smoothing=label_smoothing, n_trained=n_rows)


def d_logits_label_share_overwritten(logits: Array, labels: Array, label_smoothing: float, n_trained: int) -> Array:
    """The label's share of the target is 1 - e; it also has e / vocab, like every token."""
    return _d_logits(
        logits, labels, n_trained,
        lambda p, y: p - np.where(y > 0, 1 - label_smoothing, label_smoothing / p.shape[1]),
    )  # fmt: skip


def d_logits_divided_by_vocabulary(logits: Array, labels: Array, label_smoothing: float, n_trained: int) -> Array:
    """The gradient was divided by the size of the vocabulary, too; divide by n_trained only."""
    d_logits = right.our_cross_entropy_backward(logits, labels, label_smoothing=label_smoothing, n_trained=n_trained)
    return d_logits / logits.dtype.type(logits.shape[1])


def d_logits_times_probabilities(logits: Array, labels: Array, label_smoothing: float, n_trained: int) -> Array:
    """The gradient was multiplied by the probabilities; softmax minus target is already the gradient by the logits."""
    return _d_logits(logits, labels, n_trained, lambda p, y: p * (p - y))


def _lora(grad: Array, x: Array, weight: Array, lora_A: Array, lora_B: Array, scaling: float, **scales: float) -> Any:
    """Make LoRA's gradients with other scales of `frozen`, `d_x`, `d_A` and `d_B`."""
    s = {"frozen": 1.0, "d_x": scaling, "d_A": scaling, "d_B": scaling} | scales
    g, wide_x, A, B = (array.astype(np.float64) for array in (grad, x, lora_A, lora_B))
    d_x = s["frozen"] * g @ weight + s["d_x"] * (g @ B @ A)
    results = d_x, s["d_A"] * ((g @ B).T @ wide_x), s["d_B"] * (g.T @ (wide_x @ A.T))
    return tuple(result.astype(grad.dtype) for result in results)


def _lora_variant(name: str, sentence: str, scales: Any) -> Call:
    def wrong(**arguments: Any) -> Any:
        return _lora(**arguments, **scales(arguments["scaling"], len(arguments["x"])))

    wrong.__name__, wrong.__doc__ = name, sentence
    return wrong


def _scaled_otherwise() -> Iterator[Call]:
    """Make LoRA's gradients with the scale left out of some of them, or squared in some."""
    parts = {"d_A": "the gradient of A", "d_B": "the gradient of B", "d_x": "the adapter's part of the gradient by x"}
    for n in (1, 2, 3):
        for names in combinations(parts, n):
            words = " and ".join(parts[name] for name in names)
            yield _lora_variant(
                f"{'_'.join(names)}_not_scaled", f"The scale is missing in {words}.",
                lambda s, n_tokens, names=names: dict.fromkeys(names, 1.0),
            )  # fmt: skip
            yield _lora_variant(
                f"{'_'.join(names)}_scaled_twice", f"The scale is squared in {words}.",
                lambda s, n_tokens, names=names: dict.fromkeys(names, s * s),
            )  # fmt: skip


def d_b_from_the_way_back(
    grad: Array, x: Array, weight: Array, lora_A: Array, lora_B: Array, scaling: float
) -> tuple[Array, Array, Array]:
    """The gradient of B was made from grad B; it needs the activation between the two matrices, x A^T."""
    d_x, d_A, _ = right.lora_backward(grad, x, weight, lora_A, lora_B, scaling)
    return d_x, d_A, scaling * grad.T @ (grad @ lora_B)


LORA = (
    d_b_from_the_way_back,
    *_scaled_otherwise(),
    _lora_variant(
        "frozen_scaled", "W's part of the gradient by x was scaled; only the adapter's part is.",
        lambda s, n_tokens: {"frozen": s},
    ),
    _lora_variant(
        "mean_over_tokens", "The gradients of A and B were averaged over the tokens; sum them.",
        lambda s, n_tokens: {"d_A": s / n_tokens, "d_B": s / n_tokens},
    ),
)  # fmt: skip


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def _swiglu(name: str, sentence: str, slope: Any, value: Any = lambda gate: gate * _sigmoid(gate)) -> Call:
    """Make a wrong backward pass of SwiGLU: `slope` is SiLU's derivative, `value` SiLU itself."""

    def wrong(grad: Array, gate: Array, up: Array) -> tuple[Array, Array]:
        return (grad * up * slope(gate)).astype(grad.dtype), (grad * value(gate)).astype(grad.dtype)

    wrong.__name__, wrong.__doc__ = name, sentence
    return wrong


SIGMOID_SLOPE = "The derivative of the sigmoid was taken; SiLU's is sigmoid(x) * (1 + x * (1 - sigmoid(x)))."
SWIGLU = (
    _swiglu("derivative_of_sigmoid", SIGMOID_SLOPE, lambda x: _sigmoid(x) * (1 - _sigmoid(x))),
    _swiglu("x_times_derivative_of_sigmoid", "The first term of SiLU's derivative is missing: sigmoid(x).",
            lambda x: x * _sigmoid(x) * (1 - _sigmoid(x))),
    _swiglu("sign_in_silu_derivative", "A sign is wrong in SiLU's derivative: sigmoid(x) * (1 + x * (1 - sigmoid(x))).",
            lambda x: _sigmoid(x) * (1 - x * (1 - _sigmoid(x)))),
    _swiglu("x_missing_in_derivative", "x is missing in SiLU's derivative: sigmoid(x) * (1 + x * (1 - sigmoid(x))).",
            lambda x: _sigmoid(x) * (1 + (1 - _sigmoid(x)))),
    _swiglu("silu_in_place_of_sigmoid",
            "SiLU stands in place of the sigmoid in its derivative: sigmoid(x) * (1 + x * (1 - sigmoid(x))).",
            lambda x: x * _sigmoid(x) * (1 + x * (1 - x * _sigmoid(x)))),
    _swiglu("one_plus_x_times_sigmoid",
            "A bracket is wrong in SiLU's derivative, sigmoid(x) * (1 + x * (1 - sigmoid(x))).",
            lambda x: _sigmoid(x) + (1 - _sigmoid(x)) * x),
    _swiglu("relu_derivative", "The derivative of ReLU was taken; SiLU's is sigmoid(x) * (1 + x * (1 - sigmoid(x))).",
            lambda x: (x > 0).astype(np.float64)),
    _swiglu("gradient_of_gate_times_up", "The gradient is that of gate * up without SiLU.",
            np.ones_like, lambda gate: gate),
    _swiglu("silu_missing_in_d_up", "The gradient of up was multiplied by the gate; multiply by silu(gate).",
            lambda x: _sigmoid(x) * (1 + x * (1 - _sigmoid(x))), lambda gate: gate),
    _swiglu("sigmoid_in_d_up", "The gradient of up was multiplied by the sigmoid of the gate; multiply by silu(gate).",
            lambda x: _sigmoid(x) * (1 + x * (1 - _sigmoid(x))), _sigmoid),
)  # fmt: skip


def _norm_parts(x: Array, eps: float) -> tuple[Array, Array]:
    wide = x.astype(np.float64)
    return wide, np.sqrt(np.square(wide).mean(axis=-1, keepdims=True) + eps)


def _norm_backward(name: str, sentence: str, formula: Any) -> Call:
    """Make a wrong backward pass of RMSNorm from `formula(grad, x, weight, root, n)`."""

    def wrong(grad: Array, x: Array, weight: Array, eps: float) -> Array:
        wide, root = _norm_parts(x, eps)
        return formula(grad.astype(np.float64), wide, weight.astype(np.float64), root, x.shape[-1]).astype(x.dtype)

    wrong.__name__, wrong.__doc__ = name, sentence
    return wrong


def _dot(a: Array, b: Array) -> Array:
    return (a * b).sum(axis=-1, keepdims=True)


NORM = (
    _norm_backward("second_term_not_divided_by_width", "The second term is a mean over the row; it was a sum.",
                   lambda g, x, w, r, n: g * w / r - x * _dot(g * w, x) / r**3),
    _norm_backward("second_term_added", "The second term was added; subtract it.",
                   lambda g, x, w, r, n: g * w / r + x * _dot(g * w, x) / (n * r**3)),
    _norm_backward("second_term_divided_by_root", "The second term was divided by the root once; divide by its cube.",
                   lambda g, x, w, r, n: g * w / r - x * _dot(g * w, x) / (n * r)),
    _norm_backward("second_term_divided_by_square",
                   "The second term was divided by the mean square; divide by the cube of the root.",
                   lambda g, x, w, r, n: g * w / r - x * _dot(g * w, x) / (n * r**2)),
    _norm_backward("gain_missing_in_second_term", "The gain is missing in the second term: it has grad * weight, too.",
                   lambda g, x, w, r, n: g * w / r - x * _dot(g, x) / (n * r**3)),
    _norm_backward("gain_missing_in_first_term", "The gain is missing in the first term: grad * weight / root.",
                   lambda g, x, w, r, n: g / r - x * _dot(g * w, x) / (n * r**3)),
    _norm_backward("gain_outside_of_second_term", "The gain was multiplied at the end; it belongs to grad.",
                   lambda g, x, w, r, n: w * (g / r - x * _dot(g, x) / (n * r**3))),
    _norm_backward("root_not_divided", "The gradient was not divided by the root of the mean square.",
                   lambda g, x, w, r, n: g * w - x * _dot(g * w, x) / (n * r**2)),
    _norm_backward("second_term_over_all_tokens", "The second term sums over all tokens; every row has its own sum.",
                   lambda g, x, w, r, n: g * w / r - x * (g * w * x).sum() / (n * r**3)),
    _norm_backward("second_term_squared", "The second term has x squared; it is x times the sum of grad * weight * x.",
                   lambda g, x, w, r, n: g * w / r - g * w * x * x / (n * r**3)),
    _norm_backward("mean_subtracted", "The backward pass of LayerNorm was taken; RMSNorm subtracts no mean.",
                   lambda g, x, w, r, n: (g * w - (g * w).mean(-1, keepdims=True)) / r
                   - x * _dot(g * w, x) / (n * r**3)),
)  # fmt: skip


def _grouped(array: Array, n_groups: int) -> Array:
    return array.reshape(n_groups, -1, *array.shape[1:])


def context_gradient_cut_without_transpose(grad: Array, probs: Array, v: Array) -> tuple[Array, Array]:
    """grad was reshaped to (heads, seq, head_dim) at once; cut it to (seq, heads, head_dim), then exchange the axes."""
    cut = grad.reshape(len(probs), len(grad), -1).swapaxes(0, 1).reshape(grad.shape)
    return right.our_context_backward(cut, probs, v)


def values_summed_over_tiled_heads(grad: Array, probs: Array, v: Array) -> tuple[Array, Array]:
    """The value's gradient sums every n_kv_heads-th query head; query head h reads value head h // group size."""
    return right.our_context_backward(grad, probs, v)[0], values_tiled_over_heads(grad, probs, v)[1]


def values_of_last_query_head(grad: Array, probs: Array, v: Array) -> tuple[Array, Array]:
    """The gradient of a value counts the last query head of its group alone: add them up, with +=."""
    by_head = grad.reshape(len(grad), len(probs), -1).swapaxes(0, 1).astype(np.float64)
    d_v = (probs.swapaxes(1, 2) @ by_head).reshape(len(v), -1, *v.shape[1:])[:, -1]
    return right.our_context_backward(grad, probs, v)[0], d_v.astype(v.dtype)


def keys_of_last_query_head(grad: Array, q: Array, k: Array) -> tuple[Array, Array]:
    """The gradient of a key counts the last query head of its group alone: add them up, with +=."""
    d_k = grad.swapaxes(1, 2).astype(np.float64) @ q.swapaxes(0, 1) / np.sqrt(q.shape[-1])
    return right.our_scores_backward(grad, q, k)[0], d_k.reshape(len(k), -1, *k.shape[1:])[:, -1].astype(k.dtype)


def values_averaged_over_group(grad: Array, probs: Array, v: Array) -> tuple[Array, Array]:
    """The gradient of a value was averaged over the query heads of its group; sum it."""
    d_probs, d_v = right.our_context_backward(grad, probs, v)
    return d_probs, d_v / d_v.dtype.type(len(probs) // len(v))


def values_tiled_over_heads(grad: Array, probs: Array, v: Array) -> tuple[Array, Array]:
    """Heads were grouped with np.tile: query head h reads value head h // group size."""
    group = len(probs) // len(v)
    by_head = grad.reshape(len(grad), len(probs), -1).swapaxes(0, 1).astype(np.float64)
    d_probs = by_head @ np.tile(v, (group, 1, 1)).swapaxes(1, 2)
    d_v = (probs.swapaxes(1, 2) @ by_head).reshape(group, len(v), *v.shape[1:]).sum(axis=0)
    return d_probs.astype(probs.dtype), d_v.astype(v.dtype)


def _probs_backward(name: str, sentence: str, formula: Any) -> Call:
    def wrong(grad: Array, probs: Array) -> Array:
        return formula(grad.astype(np.float64), probs.astype(np.float64)).astype(probs.dtype)

    wrong.__name__, wrong.__doc__ = name, sentence
    return wrong


PROBS = (
    _probs_backward("probabilities_not_multiplied", "The bracket was not multiplied by the probabilities.",
                    lambda g, p: g - _dot(g, p)),
    _probs_backward("sum_without_probabilities", "The sum has grad times probabilities; here it had grad alone.",
                    lambda g, p: p * (g - g.sum(-1, keepdims=True))),
    _probs_backward("mean_without_probabilities", "The sum has grad times probabilities; here it was a mean of grad.",
                    lambda g, p: p * (g - g.mean(-1, keepdims=True))),
    _probs_backward("mean_for_sum", "The mean over the keys was subtracted; it is the sum of grad * probs.",
                    lambda g, p: p * (g - (g * p).mean(-1, keepdims=True))),
    _probs_backward("sum_added", "The sum was added; subtract it.", lambda g, p: p * (g + _dot(g, p))),
    _probs_backward("sum_over_queries", "The sum was taken over the queries; every query sums over its keys.",
                    lambda g, p: p * (g - (g * p).sum(-2, keepdims=True))),
    _probs_backward("sum_over_head", "One sum was taken over all queries of a head; every query has its own.",
                    lambda g, p: p * (g - (g * p).sum((-2, -1), keepdims=True))),
    _probs_backward("sum_not_multiplied", "The sum was not multiplied by the probabilities: p * (g - sum).",
                    lambda g, p: p * g - _dot(g, p)),
    _probs_backward("probabilities_squared", "grad was multiplied by probs twice.",
                    lambda g, p: p * (g * p - _dot(g, p))),
)  # fmt: skip


def scores_scaled_in_d_q_only(grad: Array, q: Array, k: Array) -> tuple[Array, Array]:
    """The gradient of k was not divided by sqrt(head_dim)."""
    d_q, d_k = right.our_scores_backward(grad, q, k)
    return d_q, (d_k * np.sqrt(q.shape[-1])).astype(d_k.dtype)


def scores_scaled_in_d_k_only(grad: Array, q: Array, k: Array) -> tuple[Array, Array]:
    """The gradient of q was not divided by sqrt(head_dim)."""
    d_q, d_k = right.our_scores_backward(grad, q, k)
    return (d_q * np.sqrt(q.shape[-1])).astype(d_q.dtype), d_k


def scores_scaled_by_head_dim(grad: Array, q: Array, k: Array) -> tuple[Array, Array]:
    """The gradients were divided by head_dim; divide by its root."""
    return tuple((d / np.sqrt(q.shape[-1])).astype(d.dtype) for d in right.our_scores_backward(grad, q, k))  # type: ignore[return-value]


def scores_multiplied_by_root(grad: Array, q: Array, k: Array) -> tuple[Array, Array]:
    """The gradients were multiplied by sqrt(head_dim); divide by it."""
    return tuple((d * q.shape[-1]).astype(d.dtype) for d in right.our_scores_backward(grad, q, k))  # type: ignore[return-value]


def keys_tiled_over_heads(grad: Array, q: Array, k: Array) -> tuple[Array, Array]:
    """Heads were grouped with np.tile: query head h reads key head h // group size."""
    group, scale = q.shape[1] // len(k), np.sqrt(q.shape[-1])
    d_q = (grad.astype(np.float64) @ np.tile(k, (group, 1, 1))).swapaxes(0, 1) / scale
    d_k = (grad.swapaxes(1, 2).astype(np.float64) @ q.swapaxes(0, 1)).reshape(group, *k.shape).sum(axis=0) / scale
    return d_q.astype(q.dtype), d_k.astype(k.dtype)


def keys_summed_over_tiled_heads(grad: Array, q: Array, k: Array) -> tuple[Array, Array]:
    """The key's gradient sums every n_kv_heads-th query head; query head h reads key head h // group size."""
    return right.our_scores_backward(grad, q, k)[0], keys_tiled_over_heads(grad, q, k)[1]


def keys_averaged_over_group(grad: Array, q: Array, k: Array) -> tuple[Array, Array]:
    """The gradient of a key was averaged over the query heads of its group; sum it."""
    d_q, d_k = right.our_scores_backward(grad, q, k)
    return d_q, d_k / d_k.dtype.type(q.shape[1] // len(k))


def rope_backward_of_rotated_half(grad: Array, cos: Array, sin: Array) -> Array:
    """The second half was computed from the first half after its rotation; use it as it was in grad."""
    first, second = np.split(grad, 2, axis=-1)
    c, s = (table[:, None].astype(grad.dtype) for table in (cos, sin))
    rotated = first * c + second * s
    return np.concatenate([rotated, second * c - rotated * s], axis=-1)


def _backward_halves(name: str, sentence: str, signs: tuple[int, int]) -> Call:
    """Rotate back with other signs of the sine's term in both halves."""

    def wrong(grad: Array, cos: Array, sin: Array) -> Array:
        first, second = np.split(grad, 2, axis=-1)
        c, s = (table[:, None].astype(grad.dtype) for table in (cos, sin))
        return np.concatenate([first * c + signs[0] * second * s, second * c + signs[1] * first * s], axis=-1)

    wrong.__name__, wrong.__doc__ = name, sentence
    return wrong


SIGNS = (
    _backward_halves("sine_added_in_both_halves",
                     "The sine's term was added in both halves; back, the second half subtracts it.", (1, 1)),
    _backward_halves("sine_subtracted_in_both_halves",
                     "The sine's term was subtracted in both halves; back, the first half adds it.", (-1, -1)),
)  # fmt: skip


def rope_backward_divided(grad: Array, cos: Array, sin: Array) -> Array:
    """The gradient was divided by cos and sin; a rotation is turned back by the opposite angle."""
    first, second = np.split(grad, 2, axis=-1)
    c, s = (table[:, None].astype(grad.dtype) for table in (cos, sin))
    return np.concatenate([first / c - second / s, second / c + first / s], axis=-1)


def residual_product(grad: Array, through: Array) -> Array:
    """The two gradients were multiplied; they add up."""
    return grad * through


def residual_as_chain(grad: Array, through: Array) -> Array:
    """through was multiplied by grad again; it is a gradient already, so add it."""
    return grad + grad * through


def _clip(grads: Arrays, factor: float, norm: float) -> tuple[Array, float]:
    return right.in_one_row(grads) * np.float32(factor), norm


def _norm(grads: Arrays) -> float:
    return math.sqrt(sum(float(np.square(grad, dtype=np.float64).sum()) for grad in grads.values()))


def clip_always(grads: Arrays, max_norm: float) -> tuple[Array, float]:
    """Small gradients were enlarged to max_norm; gradients below the limit stay as they are."""
    return _clip(grads, max_norm / (_norm(grads) + 1e-6), _norm(grads))


def clip_returns_new_norm(grads: Arrays, max_norm: float) -> tuple[Array, float]:
    """The norm after clipping was returned; return the one before."""
    return right.clip_by_norm(grads, max_norm)[0], min(_norm(grads), max_norm)


def clip_without_root(grads: Arrays, max_norm: float) -> tuple[Array, float]:
    """The sum of squares was taken for the norm; the norm is its root."""
    square = _norm(grads) ** 2
    return _clip(grads, min(1.0, max_norm / (square + 1e-6)), square)


def clip_by_mean_square(grads: Arrays, max_norm: float) -> tuple[Array, float]:
    """The root of the mean of squares was taken; the norm is the root of their sum."""
    norm = _norm(grads) / math.sqrt(sum(grad.size for grad in grads.values()))
    return _clip(grads, min(1.0, max_norm / (norm + 1e-6)), norm)


def clip_by_absolute_sum(grads: Arrays, max_norm: float) -> tuple[Array, float]:
    """The sum of absolute values was taken for the norm; it is the root of the sum of squares."""
    norm = float(sum(np.abs(grad).sum(dtype=np.float64) for grad in grads.values()))
    return _clip(grads, min(1.0, max_norm / (norm + 1e-6)), norm)


def clip_by_spectral_norm(grads: Arrays, max_norm: float) -> tuple[Array, float]:
    """np.linalg.norm(g, 2) of a matrix is its largest singular value; take the root of the sum of squares."""
    norm = math.sqrt(sum(float(np.linalg.norm(grad.astype(np.float64), 2)) ** 2 for grad in grads.values()))
    return _clip(grads, min(1.0, max_norm / (norm + 1e-6)), norm)


def clip_by_largest(grads: Arrays, max_norm: float) -> tuple[Array, float]:
    """The largest absolute value was taken for the norm; it is the root of the sum of squares."""
    norm = float(max(np.abs(grad).max() for grad in grads.values()))
    return _clip(grads, min(1.0, max_norm / (norm + 1e-6)), norm)


def clip_by_first_tensor(grads: Arrays, max_norm: float) -> tuple[Array, float]:
    """The norm counts the first tensor only; it is the norm of all tensors together."""
    norm = _norm(dict([next(iter(grads.items()))]))
    return _clip(grads, min(1.0, max_norm / (norm + 1e-6)), norm)


def _adamw(name: str, sentence: str, **changes: Any) -> Call:
    """Make a wrong AdamW step; changes replace `m`, `v`, `update` and `decay`."""

    def wrong(
        param: Array, grad: Array, m: Array, v: Array, step: int, lr: float, beta1: float, beta2: float, eps: float,
        weight_decay: float,
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        b1, b2 = changes.get("betas", lambda b1, b2: (b1, b2))(beta1, beta2)
        gradient = changes.get("gradient", lambda g, p, decay: g)(grad, param, weight_decay)
        new_m = changes.get("m", lambda m, g, b: b * m + (1 - b) * g)(m, gradient, b1)
        new_v = changes.get("v", lambda v, g, b: b * v + (1 - b) * g * g)(v, gradient, b2)
        t = changes.get("step", lambda t: t)(step)
        correct_m, correct_v = new_m / (1 - b1**t), new_v / (1 - b2**t)
        update = changes.get("update", lambda m, v, eps, raw: m / (np.sqrt(v) + eps))
        delta = update(correct_m, correct_v, eps, (new_m, new_v, b1, b2, t, m, v))
        decay = changes.get("decay", lambda lr, decay: lr * decay)(lr, weight_decay)
        new = param * (1 - decay) - changes.get("rate", lambda lr: lr)(lr) * delta
        return tuple(array.astype(param.dtype) for array in (new, new_m, new_v))  # type: ignore[return-value]

    wrong.__name__, wrong.__doc__ = name, sentence
    return wrong


ADAMW = (
    _adamw("eps_before_the_correction", "eps was added before v was corrected: sqrt(v / (1 - beta2^t)) + eps.",
           update=lambda m, v, eps, raw: m / ((np.sqrt(raw[1]) + eps) / math.sqrt(1 - raw[3] ** raw[4]))),
    _adamw("eps_inside_and_uncorrected", "eps was added to v before the root; add it behind the root.",
           update=lambda m, v, eps, raw: m / np.sqrt(raw[1] + eps) * math.sqrt(1 - raw[3] ** raw[4])),
    _adamw("only_m_corrected", "Only m was corrected; v is divided by 1 - beta2^t, too.",
           update=lambda m, v, eps, raw: m / (np.sqrt(raw[1]) + eps)),
    _adamw("only_v_corrected", "Only v was corrected; m is divided by 1 - beta1^t, too.",
           update=lambda m, v, eps, raw: raw[0] / (np.sqrt(v) + eps)),
    _adamw("v_corrected_with_beta1", "v was corrected with beta1; its decay is beta2.",
           update=lambda m, v, eps, raw: m / (np.sqrt(raw[1] / (1 - raw[2] ** raw[4])) + eps)),
    _adamw("m_corrected_with_beta2", "m was corrected with beta2; its decay is beta1.",
           update=lambda m, v, eps, raw: raw[0] / (1 - raw[3] ** raw[4]) / (np.sqrt(v) + eps)),
    _adamw("correction_multiplied", "m and v were multiplied by the correction; divide by 1 - beta^t.",
           update=lambda m, v, eps, raw: raw[0] * (1 - raw[2] ** raw[4])
           / (np.sqrt(raw[1] * (1 - raw[3] ** raw[4])) + eps)),
    _adamw("correction_without_power", "The correction is 1 - beta; it is 1 - beta^t.",
           update=lambda m, v, eps, raw: raw[0] / (1 - raw[2]) / (np.sqrt(raw[1] / (1 - raw[3])) + eps)),
    _adamw("correction_times_step", "The correction is 1 - beta * t; it is 1 - beta^t.",
           update=lambda m, v, eps, raw: raw[0] / (1 - raw[2] * raw[4])
           / (np.sqrt(raw[1] / (1 - raw[3] * raw[4])) + eps)),
    _adamw("step_from_zero", "The correction counts from step 0; step is 1 in the first step.", step=lambda t: t - 1),
    _adamw("momentum_left_out", "The gradient moved the tensor, not m.",
           m=lambda m, g, b: g, update=lambda m, v, eps, raw: raw[0] / (np.sqrt(v) + eps)),
    _adamw("v_without_square", "v is the running mean of the gradient; it is that of its square.",
           v=lambda v, g, b: b * v + (1 - b) * np.abs(g)),
    _adamw("v_of_gradient", "v is the running mean of the gradient; it is that of its square.",
           v=lambda v, g, b: b * v + (1 - b) * g),
    _adamw("v_not_weighted", "The square was added to v without 1 - beta2.", v=lambda v, g, b: b * v + g * g),
    _adamw("betas_exchanged_in_means", "The shares are exchanged: m = beta1 * m + (1 - beta1) * grad.",
           m=lambda m, g, b: (1 - b) * m + b * g, v=lambda v, g, b: (1 - b) * v + b * g * g),
    _adamw("ascent", "The update was added; subtract it.", rate=lambda lr: -lr),
    _adamw("rate_squared", "The update was multiplied by the rate twice.", rate=lambda lr: lr * lr),
    _adamw("m_of_old_step", "The tensor was moved by m and v before their update.",
           update=lambda m, v, eps, raw: raw[5] / (1 - raw[2] ** raw[4])
           / (np.sqrt(raw[6] / (1 - raw[3] ** raw[4])) + eps)),
)  # fmt: skip


def _rate(name: str, sentence: str, formula: Any) -> Call:
    """Make a wrong learning rate from `formula(right rate, step, schedule, peak, warm-up, total)`."""

    def wrong(step: int, schedule: str, peak: float, warmup_steps: int, total_steps: int) -> float:
        rate = right.learning_rate(step, schedule, peak, warmup_steps, total_steps)
        return float(formula(rate, step, schedule, peak, warmup_steps, total_steps))

    wrong.__name__, wrong.__doc__ = name, sentence
    return wrong


def _share(step: int, warmup_steps: int, total_steps: int) -> float:
    return (step - warmup_steps) / max(1, total_steps - warmup_steps)


def _after(change: Any) -> Any:
    """Change the rate after the warm-up only."""
    return lambda rate, step, schedule, peak, warm, total: (
        rate if step < warm else change(rate, step, schedule, peak, warm, total)
    )


RATES = (
    _rate("warmup_from_one", "The warm-up starts at peak / warmup_steps; step 0 has the rate 0.",
          lambda r, t, s, peak, warm, total: peak * (t + 1) / warm if t < warm else r),
    _rate("cosine_without_half", "The cosine goes from 2 to 0; halve it: (1 + cos) / 2.",
          _after(lambda r, t, s, peak, warm, total: 2 * r if s == "cosine" else r)),
    _rate("cosine_alone", "The cosine was taken alone, which becomes negative: (1 + cos) / 2.",
          _after(lambda r, t, s, peak, warm, total: peak * math.cos(math.pi * _share(t, warm, total))
                 if s == "cosine" else r)),
    _rate("quarter_of_a_cosine",
          "A quarter of a cosine was taken, cos(pi / 2 * share); it is (1 + cos(pi * share)) / 2.",
          _after(lambda r, t, s, peak, warm, total: peak * math.cos(math.pi / 2 * _share(t, warm, total))
                 if s == "cosine" else r)),
    _rate("cosine_rises", "The cosine rises: (1 - cos) / 2; it falls: (1 + cos) / 2.",
          _after(lambda r, t, s, peak, warm, total: peak - r if s == "cosine" else r)),
    _rate("cosine_in_degrees", "The angle is in degrees; math.cos takes radians: pi * share.",
          _after(lambda r, t, s, peak, warm, total: r if s != "cosine" else
                 peak / 2 * (1 + math.cos(math.radians(math.pi * _share(t, warm, total)))))),
    _rate("linear_rises", "The linear rate rises after the warm-up; it falls to 0.",
          _after(lambda r, t, s, peak, warm, total: peak - r if s == "linear" else r)),
    _rate("decay_from_step_zero", "The fall was counted from step 0; count from the end of the warm-up.",
          _after(lambda r, t, s, peak, warm, total: right.learning_rate(t, s, peak, 0, total - warm))),
    _rate("total_without_warmup", "The fall takes total_steps behind the warm-up; the total includes the warm-up.",
          _after(lambda r, t, s, peak, warm, total: right.learning_rate(t, s, peak, warm, total + warm))),
    _rate("always_constant", "The rate stays at the peak after the warm-up, whatever the schedule.",
          _after(lambda r, t, s, peak, warm, total: peak)),
    _rate("warmup_squared", "The warm-up rises with the square; it rises evenly.",
          lambda r, t, s, peak, warm, total: r * t / warm if t < warm else r),
)  # fmt: skip


def sums_weighted_again(loss_sums: Array, n_trained: Array, grad_sums: Array) -> tuple[float, Array]:
    """The sums were taken for means and weighted by their tokens; add the sums, and divide once."""
    weights = n_trained / n_trained.sum()
    return float((loss_sums * weights).sum()), (grad_sums * weights[:, None].astype(grad_sums.dtype)).sum(axis=0)


def accumulated_mean_of_losses(loss_sums: Array, n_trained: Array, grad_sums: Array) -> tuple[float, Array]:
    """The loss is a mean of the batches' means; divide the sum of all losses by all tokens."""
    return float((loss_sums / n_trained).mean()), right.accumulated(loss_sums, n_trained, grad_sums)[1]


def accumulated_mean_of_gradients(loss_sums: Array, n_trained: Array, grad_sums: Array) -> tuple[float, Array]:
    """The gradient is a mean of the batches' means; divide the sum of all by all tokens."""
    means = grad_sums / n_trained[:, None].astype(grad_sums.dtype)
    return right.accumulated(loss_sums, n_trained, grad_sums)[0], means.mean(axis=0)


def accumulated_by_batches(loss_sums: Array, n_trained: Array, grad_sums: Array) -> tuple[float, Array]:
    """The sums were divided by the number of batches; divide by the number of learned tokens."""
    return float(loss_sums.mean()), grad_sums.mean(axis=0)


def gradient_by_batches(loss_sums: Array, n_trained: Array, grad_sums: Array) -> tuple[float, Array]:
    """The gradient was divided by the number of batches; divide by the number of learned tokens."""
    return right.accumulated(loss_sums, n_trained, grad_sums)[0], grad_sums.mean(axis=0)


def loss_by_batches(loss_sums: Array, n_trained: Array, grad_sums: Array) -> tuple[float, Array]:
    """The loss was divided by the number of batches; divide by the number of learned tokens."""
    return float(loss_sums.mean()), right.accumulated(loss_sums, n_trained, grad_sums)[1]


def accumulated_gradient_not_divided(loss_sums: Array, n_trained: Array, grad_sums: Array) -> tuple[float, Array]:
    """The gradient was not divided by the number of learned tokens."""
    return right.accumulated(loss_sums, n_trained, grad_sums)[0], grad_sums.sum(axis=0)


def accumulated_loss_not_divided(loss_sums: Array, n_trained: Array, grad_sums: Array) -> tuple[float, Array]:
    """The loss was not divided by the number of learned tokens."""
    return float(loss_sums.sum()), right.accumulated(loss_sums, n_trained, grad_sums)[1]


def accumulated_by_last_count(loss_sums: Array, n_trained: Array, grad_sums: Array) -> tuple[float, Array]:
    """The sums were divided by the tokens of the last batch; divide by those of all batches."""
    return float(loss_sums.sum() / n_trained[-1]), grad_sums.sum(axis=0) / grad_sums.dtype.type(n_trained[-1])


def merged_transposed(weight: Array, lora_A: Array, lora_B: Array, scaling: float) -> Array:
    """The product was transposed; it is B A, of the shape of the matrix."""
    return (weight + scaling * (lora_A.T.astype(np.float64) @ lora_B.T).T[::-1]).astype(weight.dtype)


def merged_all_scaled(weight: Array, lora_A: Array, lora_B: Array, scaling: float) -> Array:
    """The matrix was scaled, too; only the product is."""
    return (scaling * right.merged(weight, lora_A, lora_B, 1.0).astype(np.float64)).astype(weight.dtype)


def interleaved_backwards(rows: Array, n_heads: int) -> Array:
    """The rows were reordered the other way, from pairs to halves."""
    pairs = rows.reshape(n_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def interleaved_over_all_heads(rows: Array, n_heads: int) -> Array:
    """All rows were interleaved as one head; each head is reordered alone."""
    return right.our_interleave(rows, 1)


def _alpha(name: str, sentence: str, choose: Any) -> Call:
    def wrong(lora_alpha: float, scalings: Array, ranks: Array) -> float:
        return float(choose(scalings, ranks))

    wrong.__name__, wrong.__doc__ = name, sentence
    return wrong


ALPHAS = (
    _alpha("alpha_of_first_matrix", "The alpha of the first matrix was returned; if the others differ, return 0.",
           lambda s, r: np.float32(s[0] * r[0])),
    _alpha("alpha_of_last_matrix", "The alpha of the last matrix was returned; if the others differ, return 0.",
           lambda s, r: np.float32(s[-1] * r[-1])),
    _alpha("mean_of_alphas", "The mean of the alphas was returned; if they differ, return 0.",
           lambda s, r: np.mean(s * r)),
    _alpha("largest_alpha", "The largest alpha was returned; if they differ, return 0.", lambda s, r: np.max(s * r)),
    _alpha("alpha_if_scales_are_equal", "The scales were compared; compare scale times rank of all matrices.",
           lambda s, r: np.float32(s[0] * r[0]) if len({*s.tolist()}) == 1 else 0.0),
    _alpha("alpha_is_scale", "The scale was returned; alpha is scale times rank.",
           lambda s, r: s[0] if len({*s.tolist()}) == 1 else 0.0),
)  # fmt: skip

WRONG: Mapping[str, Sequence[Call]] = {
    "lora_scaling": (
        scaling_multiplied, scaling_always_root, scaling_root_of_quotient, scaling_as_whole_number,
        scaling_without_patterns, own_rank_ignored, own_alpha_only_with_own_rank,
        own_rank_only_with_own_alpha, scaling_only_with_patterns,
    ),
    "lora_delta": (factors_in_reading_order, delta_averaged_over_rank,),
    "masked_labels": (
        labels_of_prompt, _labels_masked_with(0), _labels_masked_with(-1),
    ),
    "shifted": (
        wanted_wraps_around, wanted_of_the_token_before, wanted_wraps_backwards, last_label_repeated, last_label_zero,
    ),
    "cross_entropy": (
        *SMALL_NUMBERS,
        loss_as_mean, loss_over_all_rows, loss_and_count_over_all_rows, ignored_rows_as_token_zero,
        _but_last, loss_of_all_labels_in_all_rows, loss_of_probabilities, smoothing_to_other_tokens,
        smoothing_not_divided, smoothing_alone,
    ),
    "cross_entropy_backward": (
        d_logits_divided_by_rows_in_loss, d_logits_label_share_overwritten,
        d_logits_not_divided, d_logits_smoothing_of_label_only, d_logits_smoothing_added,
        d_logits_smoothing_twice, d_logits_of_ignored_rows, d_logits_divided_by_vocabulary,
        d_logits_times_probabilities,
    ),
    "lora_backward": LORA,
    "swiglu_backward": (*SWIGLU,),
    "rms_norm_backward": NORM,
    "attention_context_backward": (
        context_gradient_cut_without_transpose, values_summed_over_tiled_heads,         values_of_last_query_head,
        values_averaged_over_group,
        values_tiled_over_heads,
    ),
    "attention_probs_backward": PROBS,
    "attention_scores_backward": (
        scores_scaled_in_d_q_only, scores_scaled_in_d_k_only, scores_scaled_by_head_dim, scores_multiplied_by_root,
        keys_of_last_query_head, keys_tiled_over_heads, keys_summed_over_tiled_heads, keys_averaged_over_group,
    ),
    "rope_backward": (
        *SIGNS, rope_backward_of_rotated_half,
        rope_backward_divided,
    ),
    "residual_backward": (residual_product, residual_as_chain,),
    "clip_by_norm": (
        clip_always, clip_returns_new_norm, clip_without_root, clip_by_mean_square, clip_by_absolute_sum,
        clip_by_largest, clip_by_spectral_norm, clip_by_first_tensor,
    ),
    "adamw_step": ADAMW,
    "learning_rate": RATES,
    "accumulated": (
        sums_weighted_again,
        accumulated_mean_of_losses, accumulated_mean_of_gradients, accumulated_by_batches, gradient_by_batches,
        loss_by_batches,
        accumulated_gradient_not_divided, accumulated_loss_not_divided,
        accumulated_by_last_count,
    ),
    "merged": (
        merged_transposed, merged_all_scaled,
    ),
    "interleave": (interleaved_backwards, interleaved_over_all_heads),
    "gguf_alpha": ALPHAS,
}  # fmt: skip
