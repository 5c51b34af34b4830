"""Wrong code for gradients, by the name of the known mistake."""

import numpy as np


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def mean_over_rows(logits: np.ndarray, labels: np.ndarray, label_smoothing: float, n_trained: int) -> np.ndarray:
    target = np.full(logits.shape, label_smoothing / logits.shape[1], logits.dtype)
    counted = np.flatnonzero(labels >= 0)
    target[counted, labels[counted]] += 1 - label_smoothing
    return (softmax(logits) - target) * (labels >= 0)[:, None] / np.float32(len(labels))


def target_forgotten(logits: np.ndarray, labels: np.ndarray, label_smoothing: float, n_trained: int) -> np.ndarray:
    return softmax(logits) * (labels >= 0)[:, None] / np.float32(n_trained)


def lora(*, scaled: bool = True, base: bool = True, detour: bool = True):
    """The way back through W x + s B A x, with something left out."""

    def backward(grad, x, weight, lora_A, lora_B, scaling):
        d_up = (grad * scaling).astype(grad.dtype) if scaled else grad
        d_down = d_up @ lora_B
        d_x = np.zeros_like(x)
        d_x = d_x + grad @ weight if base else d_x
        d_x = d_x + d_down @ lora_A if detour else d_x
        return d_x, d_down.T @ x, d_up.T @ (x @ lora_A.T)

    return backward


def sigmoid_as_a_constant(grad: np.ndarray, gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    s = 1 / (1 + np.exp(-gate))
    return grad * up * s, grad * gate * s


def root_as_a_constant(grad: np.ndarray, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return grad * weight / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))


def gain_forgotten(grad: np.ndarray, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    root = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    n = x / root
    return (grad - n * np.mean(grad * n, axis=-1, keepdims=True)) / root


def first_head_of_each_group(grad: np.ndarray, probs: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    heads, seq, _ = probs.shape
    group, head_dim = heads // len(v), v.shape[-1]
    g = grad.reshape(seq, heads, head_dim).swapaxes(0, 1)
    d_probs = g @ np.repeat(v, group, axis=0).swapaxes(1, 2)
    return d_probs, (probs.swapaxes(1, 2) @ g)[::group]


def diagonal_alone(grad: np.ndarray, probs: np.ndarray) -> np.ndarray:
    return grad * probs


def like_a_sigmoid(grad: np.ndarray, probs: np.ndarray) -> np.ndarray:
    return grad * probs * (1 - probs)


def scores(*, scaled: bool = True, summed: bool = True):
    """The way back through the scores, with something left out."""

    def backward(grad: np.ndarray, q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        heads, group = len(grad), len(grad) // len(k)
        d = grad / np.float32(q.shape[-1] ** 0.5) if scaled else grad
        d_q = np.einsum("hsc,hcd->shd", d, np.repeat(k, group, axis=0))
        d_k = np.einsum("hsc,shd->hcd", d, q)  # of every query head
        d_k = d_k.reshape(len(k), heads // len(k), *k.shape[1:])
        return d_q, d_k.sum(axis=1) if summed else d_k[:, 0]

    return backward


def turned_forward(grad: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    cos, sin = (table[:, None, :].astype(grad.dtype) for table in (cos, sin))
    first, second = np.split(grad, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def not_turned(grad: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    return grad.copy()


def only_through(grad: np.ndarray, through: np.ndarray) -> np.ndarray:
    return through.copy()


def graph_cut(grad: np.ndarray, through: np.ndarray) -> np.ndarray:
    return np.zeros_like(grad)


WRONG = {
    "cross_entropy_backward": {
        "gradient-divided-by-rows": mean_over_rows,
        "gradient-target-missing": target_forgotten,
    },
    "lora_backward": {
        "gradient-lora-not-scaled": lora(scaled=False),
        "gradient-lora-input-left-out": lora(detour=False),
        "gradient-frozen-weight-stops-it": lora(base=False),
    },
    "swiglu_backward": {"gradient-silu-second-term-missing": sigmoid_as_a_constant},
    "rms_norm_backward": {
        "gradient-norm-second-term-missing": root_as_a_constant,
        "gradient-norm-gain-missing": gain_forgotten,
    },
    "attention_context_backward": {"gradient-values-not-summed-over-group": first_head_of_each_group},
    "attention_probs_backward": {
        "gradient-softmax-term-missing": diagonal_alone,
        "gradient-softmax-as-sigmoid": like_a_sigmoid,
    },
    "attention_scores_backward": {
        "gradient-scores-not-scaled": scores(scaled=False),
        "gradient-keys-not-summed-over-group": scores(summed=False),
    },
    "rope_backward": {"gradient-rope-turned-on": turned_forward, "gradient-rope-missing": not_turned},
    "residual_backward": {
        "gradient-residual-left-out": only_through,
        "gradient-graph-cut-between-blocks": graph_cut,
    },
}
UNTYPED: dict[str, str] = {}
