"""How far two right runs of one file may lie apart under ggml numerics, from the numbers of a golden alone.

Every stage adds an error of its own: a float32 sum in another order, a few roundings, a float32 angle. And it passes
on what its inputs are off. Errors of single elements are small and taken as independent, so *variances* go through the
pass, element by element, times the squared derivatives of the stage at the golden's values: for y = x w.T that is
var(x) @ (w * w).T. They do so in three runs at once, which differ in what a stage is given:

    ISOLATED  the golden's inputs
    CHAINED   its own; what is rounded to another number is replaced by the golden's, so that rounding ends an error
    FREE      its own; a value off by e flips with the chance e / step, and is then off by a whole step

Flips are counted as a Poisson law allows: their expected number, 4 roots of it, and 4 more. A stage is granted 4 times
the root of its summed variances (a free run 2 times, its flips are that many), an element 4 times what is its own and
its row's mean.

Source: first-order propagation of independent errors (N. Higham, Accuracy and Stability, 2.8); `sums` for sums.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from llorch.config import ModelConfig
from llorch.files import LayerWeights, Weights
from llorch.numerics import QuantMethod
from llorch.ops.rounding import BLOCK_SIZE, ActivationKind
from llorch.stages import Stage, input_key, keys, matrix_of
from llorch.verify.compare import EXACT, FACTOR, FLOOR, Tolerance
from llorch.verify.replay import Pass
from llorch.verify.sums import squared_terms

ISOLATED, CHAINED, FREE = range(3)
WORST = 4  # times what a whole row may be off: what an element of it may be
UNIT = 2.0**-24  # half a step of float32, relative
_SUM = 2 * UNIT**2 / 48  # times the width and the squared terms: the variance between two orders of a sum
_DIGITS = {"F16": 11, "BF16": 8}  # binary digits; the step of a number between 2^e and 2^(e+1) is 2^(e+1-digits)
_CODES = 127


@dataclass(frozen=True)
class Step:
    """One stage of the golden, and how far its inputs are off: variances have the three runs as first axis."""

    stage: Stage
    config: ModelConfig
    weights: Weights | LayerWeights
    positions: np.ndarray
    x: tuple[np.ndarray, ...]
    y: np.ndarray
    given: tuple[np.ndarray, ...]  # variances of x
    f16_cache: bool

    @property
    def rounding(self) -> np.ndarray:
        """The variance of one rounding of the result."""
        return np.square(UNIT * self.y)


def variances(weights: Weights, this: Pass, golden: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Expected squared differences of two right runs.

    Args:
        weights: The model, with its numerics.
        this: The tokens of the golden.
        golden: Its trace, whole.

    Yields:
        Trace key, and an array (3, *shape of the stage): isolated, chained, free.
    """
    config = weights.config
    passed: dict[str, np.ndarray] = {}
    for name, stage, layer in keys(config):
        inputs = [input_key(what, layer, config) for what in stage.input_names(config)]
        step = Step(
            stage,
            config,
            weights if layer is None else weights.layer(layer),
            this.positions,
            tuple(golden[key] for key in inputs),
            np.where(np.isfinite(golden[name]), golden[name], 0) if stage.masked else golden[name],
            tuple(passed[key] for key in inputs),
            weights.cache_dtype is np.float16,
        )
        made = np.broadcast_to(_RULES[stage.name](step), (3, *golden[name].shape))
        yield name, made
        passed[name] = made * np.array([0, 1, 1], made.dtype).reshape(3, *[1] * (made.ndim - 1))


@dataclass(frozen=True)
class Limits:
    """What is kept of the variances of one case, by trace key."""

    isolated: Mapping[str, Tolerance]
    chained: Mapping[str, np.ndarray]  # variances
    free: np.ndarray  # those of the logits


def limits_of(weights: Weights, this: Pass, golden: Mapping[str, np.ndarray]) -> Limits:
    """Derive the limits of one case; for the arguments see `variances`."""
    isolated: dict[str, Tolerance] = {}
    chained: dict[str, np.ndarray] = {}
    free = np.empty(0)
    for name, made in variances(weights, this, golden):
        isolated[name], chained[name] = limit(golden[name], made[ISOLATED]), made[CHAINED].copy()
        free = made[FREE] / 4  # twice the root is granted, since flips are already as many as can be
    return Limits(isolated, chained, free)


def limit_of_softmax(vocab_size: int) -> Tolerance:
    """What a distribution may be off: a float32 sum of so many terms, added one by one, and an exponential."""
    error = FACTOR * UNIT * math.sqrt(vocab_size / 6 + 4)
    return Tolerance(error, WORST * error).at_least(Tolerance(FLOOR, FLOOR))


def limit(golden: np.ndarray, variance: np.ndarray) -> Tolerance:
    """What an array may be off, as a whole and in its worst element.

    Args:
        golden: The array, or the rows of it that are judged.
        variance: Of the same elements, in one run.

    Returns:
        The limits; exact where nothing adds or passes on an error.
    """
    if not variance.any():
        return EXACT
    finite = np.where(np.isfinite(golden), golden, 0).astype(np.float64)
    error = FACTOR * np.sqrt(variance.sum(dtype=np.float64)) / (np.linalg.norm(finite) or 1.0)
    worst = off(variance).max() / (np.abs(finite).max() or 1.0)
    return Tolerance(float(error), float(worst)).at_least(Tolerance(FLOOR, FLOOR))


def off(variance: np.ndarray) -> np.ndarray:
    """What every element may be off."""
    return WORST * FACTOR * np.sqrt(variance + variance.mean(axis=-1, keepdims=True))


def rounded(given: np.ndarray, x: np.ndarray, kind: ActivationKind) -> np.ndarray:
    """Variances behind a rounding to codes: an error ends there, unless it moves a value over an edge."""
    if kind == "F32":
        return given
    size = BLOCK_SIZE.get(kind, 1)
    blocks, errors = x.reshape(-1, size), given[FREE].reshape(-1, size)
    if kind in _DIGITS:
        step = np.exp2(np.frexp(blocks)[1].astype(x.dtype) - _DIGITS[kind])
    else:
        step = np.abs(blocks).max(axis=-1, keepdims=True) / _CODES * np.ones_like(blocks)
    out = np.zeros_like(given)
    out[FREE] = _flipped(errors, step).reshape(x.shape)
    return out


def _flipped(variance: np.ndarray, step: np.ndarray) -> np.ndarray:
    """What flips add: each a squared step, but no more than two roundings that know nothing of one another."""
    squared = np.square(step)
    moved = np.sqrt(2 / np.pi * variance) * step  # the mean of |e|, times the step
    n = float(np.divide(moved, squared, out=np.zeros_like(moved), where=squared > 0).sum(dtype=np.float64))
    granted = (n + 4 * np.sqrt(n) + 4) / n if n else 0.0
    return np.minimum(granted * moved, variance + squared / 6)


def _exact(s: Step) -> np.ndarray:
    return np.zeros((3, *s.y.shape), s.y.dtype)


def _norm(s: Step) -> np.ndarray:
    x, given = s.x[0].reshape(s.y.shape), s.given[0].reshape(3, *s.y.shape)
    mean_square = np.square(x).mean(axis=-1, keepdims=True) + x.dtype.type(s.config.rms_norm_eps)
    return given * np.square(s.weights[s.stage.name]) / mean_square + 2 * s.rounding


def _product(s: Step) -> np.ndarray:
    weight, x = s.weights[matrix_of(s.stage, s.config)], s.x[0]
    matrix = weight.dequantize() if isinstance(weight, QuantMethod) else weight
    kind: ActivationKind = weight.activations if isinstance(weight, QuantMethod) else "F32"  # pyright: ignore
    made = rounded(s.given[0], x, kind) @ np.square(matrix).T
    if kind == "Q8_K":
        made = made + _by_scales(s.given[0], x, matrix)
    return made + _SUM * x.shape[-1] * squared_terms(x, weight) + 2 * s.rounding


def _by_scales(given: np.ndarray, x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """The float32 scale of Q8_K has no edges: a whole block moves with the error of its largest value."""
    made = np.zeros((3, len(x), len(matrix)), x.dtype)
    for start in range(0, x.shape[1], BLOCK_SIZE["Q8_K"]):
        block = slice(start, start + BLOCK_SIZE["Q8_K"])
        largest = np.abs(x[:, block]).argmax(axis=-1)[:, None]
        size = np.square(np.take_along_axis(x[:, block], largest, -1))
        relative = np.take_along_axis(given[..., block], largest[None], -1) / np.where(size, size, 1)
        made += relative * np.square(x[:, block] @ matrix[:, block].T)
    return made


def _rope(s: Step) -> np.ndarray:
    """Pairs mix their errors. The angle is a product of j + 1 float32 factors, each off by half a step.

    A scaling only slows the rotation. It adds a few roundings.
    """
    half = s.config.head_dim // 2
    j = np.arange(half)
    turns = s.positions[:, None] * s.config.rope_theta ** (-j / half)  # (seq, half)
    angle = turns * (j + np.sqrt(j) + 3) * UNIT / FACTOR  # a bound, so that nothing is granted above it
    x, given = s.x[0].reshape(s.y.shape), s.given[0].reshape(3, *s.y.shape)
    pair = given[..., :half] + given[..., half:]
    pair = pair + (np.square(x[..., :half]) + np.square(x[..., half:])) * np.square(angle)[:, None, :]
    return np.concatenate([pair, pair], axis=-1).astype(s.y.dtype) + 2 * s.rounding


def _cache(s: Step) -> np.ndarray:
    heads = s.y.shape[1], s.y.shape[0], s.y.shape[2]  # (seq, kv_heads, head_dim)
    given = rounded(s.given[0], s.x[0], "F16") if s.f16_cache else s.given[0]
    return given.reshape(3, *heads).swapaxes(1, 2)


def _scores(s: Step) -> np.ndarray:
    q, k = s.x
    given = rounded(s.given[0], q, "F16") if s.f16_cache else s.given[0]
    head_dim, squared_k = k.shape[-1], np.square(k).swapaxes(-1, -2)
    queries, errors = _grouped(np.square(q), len(k)), _grouped(given, len(k))
    made = errors @ squared_k + queries @ s.given[1].swapaxes(-1, -2) + _SUM * head_dim * (queries @ squared_k)
    return made.reshape(3, *s.y.shape) / head_dim + 2 * s.rounding


def _grouped(q: np.ndarray, n_kv_heads: int) -> np.ndarray:
    by_head = q.swapaxes(-3, -2)
    return by_head.reshape(*by_head.shape[:-3], n_kv_heads, -1, by_head.shape[-1])  # (..., kv_heads, group * seq, ...)


def _probs(s: Step) -> np.ndarray:
    """The derivative: dp = p (ds - sum(p ds)), where the sum holds the element's own ds too."""
    shifted, given = np.where(s.y > 0, s.x[0] - s.x[0].max(axis=-1, keepdims=True), 0), s.given[0]
    squared = np.square(s.y)
    made = (1 - 2 * s.y) * given + (squared * given).sum(axis=-1, keepdims=True)
    return squared * (np.maximum(made, 0) + UNIT**2 * (4 + np.square(shifted)))


def _context(s: Step) -> np.ndarray:
    probs, v = s.x
    given = rounded(s.given[0], probs, "F16") if s.f16_cache else s.given[0]
    n_kv, ctx, head_dim = v.shape
    p, e = np.square(probs).reshape(n_kv, -1, ctx), given.reshape(3, n_kv, -1, ctx)
    made = e @ np.square(v) + p @ s.given[1] + _SUM * ctx * (p @ np.square(v))
    by_head = made.reshape(3, *probs.shape[:2], head_dim).swapaxes(1, 2)
    return by_head.reshape(3, *s.y.shape) + 2 * s.rounding


def _sum(s: Step) -> np.ndarray:
    return s.given[0] + s.given[1]  # two equal pairs of numbers have equal sums


def _swiglu(s: Step) -> np.ndarray:
    gate, up = s.x
    with np.errstate(over="ignore"):
        share = 1 / (1 + np.exp(-gate))
    slope = share * (1 + gate * (1 - share))
    made = s.given[0] * np.square(slope * up) + s.given[1] * np.square(gate * share)
    return made + 4 * s.rounding


_RULES: Mapping[str, Callable[[Step], np.ndarray]] = MappingProxyType(
    {
        "embed": _exact,
        "q_rope": _rope,
        "k_rope": _rope,
        "k_cache": _cache,
        "v_cache": _cache,
        "attn_scores": _scores,
        "attn_probs": _probs,
        "attn_context": _context,
        "attn_residual": _sum,
        "block_out": _sum,
        "ffn_act": _swiglu,
        **dict.fromkeys(("attn_norm", "ffn_norm", "final_norm", "q_norm", "k_norm"), _norm),
        **dict.fromkeys(
            ("q_proj", "k_proj", "v_proj", "attn_out", "ffn_gate", "ffn_up", "ffn_out", "logits"), _product
        ),
    }
)
