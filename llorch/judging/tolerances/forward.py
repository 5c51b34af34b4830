"""Tolerances of every comparison of the forward pass, derived from rounding errors.

Mathematics (float64)
    llorch must be within `MATHEMATICS` of the float64 reference. A pass of one token, whose terms may cancel, may use
    2**-29 of its float32 tolerance if that is more, but at most the tolerance of one token among others.

Arithmetic (every other dtype)
    The tolerance of a stage is the larger of
    - the rounding cost, derived from the golden's numbers only;
    - 4 times the engines' largest distance from the float64 reference at this stage, over all layers. Distance that
      rounding does not explain adds nothing.
    In half precision, isolated stages also have a tolerance for a common factor: `limit_of_factor`.

Propagation
    A stage adds an error (another order of a sum, a few roundings, a float32 angle) and passes on its inputs' errors.
    Errors of elements are small and count as independent, so variances propagate element by element, times squared
    derivatives at the golden's values: y = x @ w.T gives var(x) @ (w * w).T. Runs propagated together:

    ISOLATED  inputs are the golden's, rounded to the dtype of the run
    CHAINED   inputs are llorch's; under ggml numerics the golden replaces values beyond a rounding edge
    FREE      ggml numerics, llorch's inputs: an error e flips a code with probability e / step and costs one step

From variances to tolerances
    stage, token  4 * sqrt(sum of variances); FREE has factor 2, because it counts as many flips as can occur
    element       16 * sqrt(its variance + mean variance of its row)
    short sums    at least 4 * sqrt(16 * largest variance), which is more only for fewer than 16 elements
    A variance assumes the largest rounding, 3 times its mean. So the tolerance is about 7 standard deviations.
    Reason for short sums: with deviations d, the norm exceeds sqrt(sum(d * d)) + 6 * max(d) with probability
    exp(-18), and an engine that adds in one lane has deviations of 1.5 roots.

Special cases
    Flips of a token (compound Poisson law) cost the mean of their squared steps, plus 4 roots of its variance, plus 4
    times the largest.

    Half precision rounds weights too, equally for all tokens. Where attention averages many values, errors therefore
    count with one sign: independent errors would vanish in the average, common errors do not.

    Where one channel of a token is much larger than all others, as in some published models, its error moves the next
    norm's divisor and all that follows. This variance comes from the norm's inputs and adds to all squared products.

    A sum of n terms t has n partial sums, each rounded by up to 2**-24 of its size. Terms of random sign give about
    2**-24 * sqrt(n / 6 * sum(t * t)); terms of one sign give 2**-24 * sqrt(n / 9) of the sum. Both count. Two engines
    err independently, and n = width / 8, as if both add in 8 lanes. Kernels for many rows add hundreds of terms in one
    lane, with errors up to 2.5 times as large; the factor 4 covers them.

    Blocks with a minimum (w = d * q + m): ggml sums d * q * x and m * x separately, and both may cancel. The terms are
    then those of each block in both sums.

Source: first-order propagation of independent errors; N. Higham, Accuracy and Stability, 2.8; ggml vec_dot.
"""

import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from llorch.files import Weights
from llorch.files.matrix import Matrix
from llorch.files.packed import TILE
from llorch.files.quant import MINIMA, decode_minima
from llorch.judging.tolerances.delta_nets import RULES as OF_DELTA_NETS
from llorch.judging.tolerances.delta_nets import own_half
from llorch.judging.tolerances.factors import limit_of_factor
from llorch.judging.tolerances.rounding import (
    CHAINED,
    DRIFT,
    FLOAT32,
    FREE,
    ISOLATED,
    SQUARES,
    SUM,
    UNIT,
    Arithmetic,
    Step,
)
from llorch.ops.numerics import QuantMethod
from llorch.ops.rounding import BLOCK_SIZE, ActivationKind
from llorch.stages.comparison import EXACT, FACTOR, FLOOR, Difference, Tolerance
from llorch.stages.stage_ref import Pass, part_of, token_axis
from llorch.stages.table import STAGES, Stage, input_keys, key, keys, matrix_of

_OF_A_TOKEN = 1e-11
MATHEMATICS = Tolerance(
    1e-12, 1e-11, _OF_A_TOKEN
)  # 4500 times what one rounding costs; a token is a part of its tensor
WORST = 4  # times what a whole row may be off: what an element of it may be
CACHES = frozenset({"k_cache", "v_cache"})
STATES = {  # what each of them reads of the passes before
    "conv_state": "conv_state", "conv_out": "conv_state", "delta_state": "delta_state", "delta_out": "delta_state",
}  # fmt: skip
NORMS = frozenset({"attn_norm", "ffn_norm", "final_norm"})  # their outputs go into products
SCORES = frozenset({"attn_scores", "attn_probs"})  # what fused attention does not show; never below float32
_DIGITS = {"F16": 11, "BF16": 8}  # binary digits; the step of a number between 2^e and 2^(e+1) is 2^(e+1-digits)
_CODES = 127
_FLOAT64 = 2.0**-29  # what a rounding of float64 costs of one of float32
_ROUNDED = 12  # a rounding is off by up to half a step: the squared step over its variance
_BLOCK = 32


def variances(
    weights: Weights,
    this: Pass,
    fed: Mapping[str, np.ndarray],
    arithmetic: Callable[[str], Arithmetic] = lambda key: FLOAT32,
    *,
    made: Mapping[str, np.ndarray] | None = None,
    hidden: Container[str] = frozenset(),
    stored: bool = False,
    past: Mapping[str, np.ndarray] = MappingProxyType({}),
    states: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> Iterator[tuple[str, np.ndarray]]:
    """Derive the expected squared differences of two right runs.

    Args:
        weights: The model, with its numerics.
        this: The tokens of the pass.
        fed: Arrays that stages are given: a golden, or any engine's own numbers. They are read as the stages come.
        arithmetic: Arithmetic of the run, by trace key.
        made: Arrays that stages compute from `fed`, if they differ from `fed`.
        hidden: Trace keys that an isolated run computes and is not fed.
        stored: True if `fed` was rounded when it was written down, and `made` was computed before that rounding.
        past: Variances of the earlier contents of the caches, by trace key; none for a pass from an empty cache.
        states: Earlier contents of delta nets, by trace key; none for a pass from an empty cache.

    Yields:
        Trace key, and an array (runs, *shape of the stage).
    """
    config, n_runs = weights.config, 3 if weights.numerics.rounds_activations else 2
    made, passed, divisor = fed if made is None else made, dict[str, np.ndarray](), np.zeros((n_runs, 1, 1), np.float32)
    for name, stage, layer in keys(config):
        inputs, state = input_keys(stage, layer, config), STATES.get(stage.name)
        step = Step(
            stage, config, weights if layer is None else weights.layer(layer), this.positions,
            tuple(_finite(fed[name], masked=name.endswith("attn_scores")) for name in inputs),
            _finite(made[name], masked=stage.masked), tuple(passed[name] for name in inputs), arithmetic(name),
            weights.cache_dtype is np.float16, divisor, past.get(key(state or stage.name, layer)),
            states.get(key(state or "", layer)),
        )  # fmt: skip
        variance = _RULES[stage.name](step)
        if stage.name in CACHES and arithmetic(name) != arithmetic(inputs[0]):
            variance = variance + step.rounding
        variance = np.broadcast_to(variance, (n_runs, *made[name].shape))
        yield name, variance
        if stage.name in NORMS:
            divisor = _divisor_variance(step)
        if stage.name == "block_out":
            passed.clear()  # of a layer nothing else is needed
        passed[name] = _passed_on(step, variance, hidden=name in hidden, stored=stored)


def _finite(array: np.ndarray, *, masked: bool) -> np.ndarray:
    """Convert to float32 and set hidden values to 0, so that they pass nothing on.

    Digits beyond float32 tell nothing about rounding.
    """
    array = array.astype(np.float32, copy=False)
    return np.where(np.isneginf(array), np.float32(0), array) if masked else array


def _passed_on(s: Step, made: np.ndarray, *, hidden: bool, stored: bool) -> np.ndarray:
    """Return the variances that the next stages are given; an isolated stage is given the golden, rounded."""
    if hidden:
        return made
    out = made.copy()
    out[ISOLATED] = s.rounding if stored or s.arithmetic.is_half else 0
    return out


class ForwardTolerances:
    """Tolerances of one case in one arithmetic, from one golden and the engines' distances from the float64 reference.

    They are derived in the order of the forward pass, as far as they were asked for.
    """

    def __init__(
        self,
        weights: Weights,
        this: Pass,
        golden: Mapping[str, np.ndarray],
        arithmetic: Arithmetic = FLOAT32,
        *,
        fused: bool = False,
        distance: Callable[[str, str], Difference | None] = lambda mode, stage: None,
    ) -> None:
        """Take a model with its numerics, and the tokens and the whole trace of a golden.

        `fused`: an isolated run computes scores and probabilities instead of being fed them. `distance` gives the
        engines' largest distance from the float64 reference, by mode and stage.
        """
        self._stages = {name: stage for name, stage, _ in keys(weights.config)}
        self._golden, self._distance, self._config = golden, distance, weights.config
        self._arithmetic, self._fused = arithmetic, fused
        self._isolated: dict[str, Tolerance] = {}
        self._chained: dict[str, np.ndarray] = {}
        self._tolerances: dict[tuple[str, int], Tolerance] = {}  # chained, to whoever asks again
        self._free = np.empty(0)
        scores = {name for name, stage in self._stages.items() if stage.name in SCORES}
        by_key = lambda at: FLOAT32 if at in scores else arithmetic  # noqa: E731
        self._steps = variances(weights, this, golden, by_key, hidden=scores if fused else ())

    def _up_to(self, name: str) -> None:
        while name not in self._isolated:
            with np.errstate(all="ignore"):  # a golden that is not finite fails as such
                at, made = next(self._steps)
                self._isolated[at] = self._limit_isolated(at, made[ISOLATED])
            self._chained[at] = made[CHAINED].copy()
            if len(made) > FREE:
                self._free = made[FREE] / 4  # the tolerance is twice the root: flips are as many as can be

    def _limit_isolated(self, name: str, variance: np.ndarray) -> Tolerance:
        """Derive it; in half precision the limit of the whole would let a factor of one per cent pass."""
        stage, golden = self._stages[name], self._golden[name]
        made = derive_tolerance(golden, variance, stage)
        if not self._arithmetic.is_half or made == EXACT:
            return made
        factor = limit_of_factor(golden, variance, stage, self._config, self._arithmetic, fused=self._fused)
        return replace(made, common_factor=factor)

    def chained_variance(self, name: str) -> np.ndarray:
        """Return the variance of every element of a stage that was given llorch's own inputs."""
        self._up_to(name)
        return self._chained[name]

    @property
    def free_variances(self) -> np.ndarray:
        """Variances of the logits of a run in which no flip was replaced."""
        self._up_to("logits")
        return self._free

    def isolated(self, name: str) -> Tolerance:
        """Return the tolerance of a stage that was given the golden's inputs."""
        self._up_to(name)
        return self._widened(self._isolated[name], "isolated", name)

    def chained(self, name: str, start: int = 0) -> Tolerance:
        """Return the tolerance of a stage that was given llorch's own inputs, for the tokens from `start` on."""
        if (name, start) not in self._tolerances:
            self._tolerances[name, start] = self._widened(self._derived(name, start), "chained", name)
        return self._tolerances[name, start]

    def in_float64(self, name: str, start: int = 0) -> Tolerance:
        """Return the tolerance in float64: `MATHEMATICS`.

        For a pass of one token it is at least the derived tolerance, up to the tolerance of a token.
        """
        if start < len(self._golden["embed"]) - 1:
            return MATHEMATICS
        error = min(_OF_A_TOKEN, _FLOAT64 * self._derived(name, start).error)
        return MATHEMATICS.at_least(Tolerance(error, 0.0))

    def _derived(self, name: str, start: int) -> Tolerance:
        """Return the chained tolerance from rounding alone, for the tokens from `start` on."""
        stage, stop = self._stages[name], len(self._golden["embed"])
        both = self._golden[name], self.chained_variance(name)
        golden, variance = (part_of(stage, array, start, stop) for array in both)
        return derive_tolerance(golden, variance, stage)

    def last_row(self) -> Tolerance:
        """Return the tolerance of the logits that sampling sees."""
        return self._widened(self._last(self.chained_variance("logits")), "chained", "selected_logits")

    def free(self) -> Tolerance:
        """Return the tolerance of the logits of a run in which no flip was replaced."""
        return derive_tolerance(self._golden["logits"], self.free_variances, self._stages["logits"])

    def free_last_row(self) -> Tolerance:
        """Return the tolerance of the last row of logits of a run in which no flip was replaced."""
        return self._last(self.free_variances)

    def moved(self) -> float:
        """Return the largest distance of two logits that rounding can swap, in root mean squares of the row."""
        variance, logits = self.chained_variance("logits"), self._golden["logits"]
        shares = variance.mean(axis=-1) / np.square(logits, dtype=np.float64).mean(axis=-1)
        return FACTOR * math.sqrt(4 * float(shares.max()))

    def _last(self, variances: np.ndarray) -> Tolerance:
        """Return the tolerance of the last token's logits from their variances."""
        made = derive_tolerance(self._golden["logits"][-1:], variances[-1:], self._stages["logits"])
        return Tolerance(made.error, made.worst)

    def _widened(self, made: Tolerance, mode: str, name: str) -> Tolerance:
        return widened(made, self._distance(mode, self._stages[name].name if name in self._stages else name))


def widened(made: Tolerance, distance: Difference | None) -> Tolerance:
    """Widen a tolerance to at least 4 times the reference engines' own distance from the float64 reference.

    An engine that is farther off than its own rounding explains is wrong, and widens no more than one that is right.
    """
    if distance is None or made == EXACT:
        return made
    return made.times(FACTOR * min(1.0, max(1 / FACTOR, distance.over(made))))


@dataclass(frozen=True)
class Margins:
    """Between which tokens of a greedy text rounding may decide, by numbers of others alone.

    Attributes:
        logits: Of each token of a text, (tokens, vocab); None where nothing is known.
        text: The text that they belong to; None where that is the golden's own.
        moved: What rounding moves: variances of the logits, or one number in root mean squares of a row.
    """

    logits: np.ndarray | None
    text: np.ndarray | None
    moved: "np.ndarray | float"

    def of(self, expected: np.ndarray, at: int, token: int) -> tuple[float, float]:
        """Measure how far the less likely of llorch's and the golden's token lies below the best token.

        Return this distance, and the distance that rounding may move. Both are in root mean squares of the logits. The
        distance is infinite if a token is invalid, or if no logits are known. Engines compute angles in float32, which
        are off by up to position * 2^-24.
        """
        pair = [token, int(expected[at])]
        known = self.text is None or np.array_equal(expected[:at], self.text[:at])
        if self.logits is None or not known or not all(0 <= one < self.logits.shape[-1] for one in pair):
            return math.inf, 0.0
        row = self.logits[at].astype(np.float64)
        size = float(np.sqrt(np.square(row).mean()))
        gap = float(row.max() - row[pair].min()) / size
        if isinstance(self.moved, np.ndarray):
            return gap, FACTOR * math.sqrt(2 * float(self.moved[at][pair].sum())) / size
        return gap, self.moved + at * 2.0**-24


NOTHING_KNOWN = Margins(None, None, 0.0)


def derive_tolerance(golden: np.ndarray, variance: np.ndarray, stage: Stage) -> Tolerance:
    """Derive the tolerance of an array, or a part of it, as a whole, in its worst element and in each of its tokens.

    `variance` is that of the same elements, in one run. The tolerance is exact where no error is added or passed on.
    """
    if not variance.any():
        return EXACT
    finite = np.where(np.isfinite(golden), golden, 0).astype(np.float64)
    along = token_axis(stage)
    axes = tuple(axis for axis in range(golden.ndim) if axis != along)
    rows, largest = variance.sum(axis=axes, dtype=np.float64), WORST**2 * variance.max(axis=axes)
    sizes = np.square(finite).sum(axis=axes)
    error = FACTOR * math.sqrt(max(rows.sum(), largest.max()) / (sizes.sum() or 1.0))
    worst = off(variance).max() / (np.abs(finite).max() or 1.0)
    rows = np.maximum(rows, largest) / np.where(sizes > 0, sizes, 1.0)
    tokens = None if along is None else FACTOR * np.sqrt(rows)
    return Tolerance(float(error), float(worst), tokens).at_least(Tolerance(FLOOR, FLOOR, FLOOR))


def off(variance: np.ndarray) -> np.ndarray:
    """Derive the largest allowed error of every element."""
    return WORST * FACTOR * np.sqrt(variance + variance.mean(axis=-1, keepdims=True))


def limit_of_softmax(vocab_size: int) -> Tolerance:
    """Derive the tolerance of a distribution.

    Its error comes from a float32 sum of `vocab_size` terms, added one by one, and an exponential.
    """
    error = FACTOR * UNIT * math.sqrt(vocab_size / 6 + 4)
    return Tolerance(error, WORST * error).at_least(Tolerance(FLOOR, FLOOR))


def moved_past_p(vocab_size: int) -> float:
    """Derive how far rounding moves a running sum of probabilities.

    Engines sum up float32 probabilities. The n partial sums of such a sum, and of the sum that normalises, are each
    rounded by up to 2^-24. The mean effect is 2^-24 * sqrt(2n / 3), and the tolerance is 4 times that.
    """
    return FACTOR * UNIT * math.sqrt(2 * vocab_size / 3)


def product_error(x: np.ndarray, weight: "np.ndarray | QuantMethod", y: np.ndarray, arithmetic: Arithmetic) -> float:
    """Derive the largest relative error of a product alone; rounding of inputs and weights counts in half precision."""
    terms = float(squared_terms(x, weight).sum(dtype=np.float64))
    size = float(np.square(y, dtype=np.float64).sum()) or 1.0
    own = x.shape[-1] * (SUM * terms + DRIFT * size) + 2 * (arithmetic.unit**2 * terms if arithmetic.is_half else 0.0)
    return max(FLOOR, FACTOR * math.sqrt(own / size + 2 * arithmetic.unit**2))


def rounded(given: np.ndarray, x: np.ndarray, kind: ActivationKind, *, token_axis: int = 0) -> np.ndarray:
    """Derive the variances after a rounding to codes: an error ends there, unless it moves a value over an edge."""
    if kind == "F32":
        return given
    out = np.zeros_like(given)
    others = tuple(axis for axis in range(x.ndim) if axis != token_axis)
    for free in (ISOLATED, FREE):  # isolated, only what was hidden is off at all
        out[free] = _flipped(given[free], _squared_steps(x, kind), others)
    return out


def _squared_steps(x: np.ndarray, kind: ActivationKind) -> np.ndarray:
    """Compute the squared steps of the codes that every value is rounded to."""
    blocks = x.reshape(-1, BLOCK_SIZE.get(kind, 1))
    if kind in _DIGITS:
        step = np.exp2(np.frexp(blocks)[1].astype(x.dtype) - _DIGITS[kind])
    else:
        step = np.abs(blocks).max(axis=-1, keepdims=True) / _CODES * np.ones_like(blocks)
    return np.square(step).reshape(x.shape)


def _flipped(variance: np.ndarray, cost: np.ndarray, of_token: tuple[int, ...]) -> np.ndarray:
    """Add the effect of flips to the variance of the error.

    Each flip is a squared step. Flips add at most the variance of two random roundings.
    """
    mean = np.sqrt(2 / np.pi * variance * cost)  # the mean of |e| / step, times the squared step
    total, spread = (part.sum(axis=of_token, keepdims=True, dtype=np.float64) for part in (mean, mean * cost))
    tolerance = total + 4 * np.sqrt(spread) + 4 * cost.max(axis=of_token, keepdims=True)
    share = np.divide(tolerance, total, out=np.zeros_like(total), where=total > 0).astype(cost.dtype)
    return variance + np.minimum(share * mean, cost / 6)


def _embed(s: Step) -> np.ndarray:
    """Derive the variance of embedding rows: 0 but for half precision."""
    return s.rounding if s.arithmetic.is_half else np.zeros_like(s.y)


def _norm_variance(s: Step) -> np.ndarray:
    made = _normed(own_half(s), s.weights[s.stage.name])
    return made + _divisor_variance(s) * np.square(s.y) if s.stage.name in NORMS else made


def _divisor_variance(s: Step) -> np.ndarray:
    """Derive the relative variance of a norm's divisor from the errors of its inputs: one number for each token.

    Where one channel is much larger than all others, its error alone moves the divisor, and with it the whole token.
    """
    squares = np.square(s.x[0])
    mean_square = squares.mean(axis=-1, keepdims=True) + squares.dtype.type(s.config.rms_norm_eps)
    moved = (squares * s.given[0]).mean(axis=-1, keepdims=True) / squares.shape[-1]
    return moved / np.square(mean_square)


def _normed(s: Step, gain: "np.ndarray | float" = 1.0) -> np.ndarray:
    """Derive the variance after a norm; the norm of Llama 4's heads has no gain."""
    x = s.x[0].reshape(s.y.shape)
    given = s.given[0].reshape(-1, *s.y.shape)
    mean_square = np.square(x).mean(axis=-1, keepdims=True) + x.dtype.type(s.config.rms_norm_eps)
    own = 2 * s.rounding + SQUARES * s.y.shape[-1] * np.square(s.y)
    return given * np.square(gain) / mean_square + own


def _product(s: Step) -> np.ndarray:
    """Derive the variance of a product with a matrix."""
    return _product_variance(s, s.weights[matrix_of(s.stage, s.config)])


def _product_variance(s: Step, weight: "np.ndarray | QuantMethod") -> np.ndarray:
    """Sum the variances of a matrix product: of its inputs, of their rounding and of the sums."""
    x = s.x[0]
    kind: ActivationKind = weight.activations if isinstance(weight, QuantMethod) else "F32"  # pyright: ignore
    given = rounded(s.given[0], x, kind)
    if s.arithmetic.activations != "F32":
        given = given + _squared_steps(x, s.arithmetic.activations) / _ROUNDED
    made, terms = np.empty((len(given), *s.y.shape), x.dtype), np.empty_like(s.y, x.dtype)
    for rows, matrix, minima in _row_by_row(weight):
        squares = np.square(matrix).T
        made[..., rows] = (given.reshape(-1, x.shape[-1]) @ squares).reshape(*given.shape[:2], -1)
        if kind == "Q8_K":
            made[..., rows] += _by_scales(s.given[0], x, matrix)
        terms[:, rows] = _squared_terms(x, matrix, minima, squares)
    made += _of_one_scale(s)
    if s.arithmetic.is_half:  # its weights are rounded, too
        made += s.arithmetic.unit**2 * terms + s.arithmetic.smallest**2 * np.square(x).sum(axis=-1, keepdims=True)
    return made + x.shape[-1] * (SUM * terms + DRIFT * np.square(s.y)) + 2 * s.rounding


def _row_by_row(weight: "np.ndarray | QuantMethod") -> Iterator[tuple[slice, np.ndarray, np.ndarray | None]]:
    """Yield tiles of a matrix's rows: their slice, the rows, and the minimum of every block.

    The minimum is None for matrices without minima.
    """
    matrix = weight.dequantize() if isinstance(weight, QuantMethod) else weight
    minima = None
    if isinstance(weight, Matrix) and weight.packed.ggml_type in MINIMA:
        minima = weight.in_order(decode_minima(weight.packed.raw, weight.packed.ggml, weight.packed.shape))
    step = max(1, TILE // matrix.shape[1])
    for start in range(0, len(matrix), step):
        rows = slice(start, start + step)
        yield rows, matrix[rows], None if minima is None else minima[rows]


def _of_one_scale(s: Step) -> np.ndarray:
    """Derive the variance from the error of the last norm's divisor, one number for a whole row.

    The error counts twice after gate * up. Isolated, the inputs are the golden's.
    """
    made = np.square(s.y) * 4 * (2 * UNIT**2 + SQUARES * s.config.hidden_size + s.divisor)
    made[ISOLATED] = 0
    return made


def _by_scales(given: np.ndarray, x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Derive the variance from the float32 scale of Q8_K.

    This scale has no edges: a whole block moves with the error of its largest value. The scale comes from that value by
    two divisions, so that the last bit of the value moves a block by a few.
    """
    made = np.zeros((len(given), len(x), len(matrix)), x.dtype)
    for start in range(0, x.shape[1], BLOCK_SIZE["Q8_K"]):
        block = slice(start, start + BLOCK_SIZE["Q8_K"])
        largest = np.abs(x[:, block]).argmax(axis=-1)[:, None]
        size = np.square(np.take_along_axis(x[:, block], largest, -1))
        relative = np.take_along_axis(given[..., block], largest[None], -1) / np.where(size, size, 1)
        made += relative * np.square(x[:, block] @ matrix[:, block].T)
    return made


def _rope_variance(s: Step) -> np.ndarray:
    """Derive the variances after RoPE, which mixes the errors of the two values of a pair.

    The angle is a product of j + 1 float32 factors, each off by half a step. A scaling only slows the rotation. It adds
    a few roundings; cosine and sine are off by some more.
    """
    half = s.config.rotated // 2
    j = np.arange(half)
    turns = s.positions[:, None] * s.config.rope_theta ** (-j / half)  # (seq, half)
    angle = (turns * (j + np.sqrt(j) + 3) + 2) * UNIT / FACTOR  # a bound, and the tolerance is not above it
    x, given = s.x[0].reshape(s.y.shape), s.given[0].reshape(-1, *s.y.shape)
    halves, neighbours = (slice(half), slice(half, 2 * half)), (slice(0, None, 2), slice(1, None, 2))
    one, other = neighbours if s.config.interleaved_rope_hf else halves
    pair = given[..., one] + given[..., other]
    pair = pair + (np.square(x[..., one]) + np.square(x[..., other])) * np.square(angle)[:, None, :]
    made = np.empty(given.shape, s.y.dtype)
    made[..., one] = made[..., other] = pair
    made[..., : 2 * half] += 2 * s.rounding[..., : 2 * half]
    made[..., 2 * half :] = given[..., 2 * half :]  # these are not turned
    return made


def _tempered_variance(s: Step) -> np.ndarray:
    """Derive the variance after the attention temperature.

    The factor is a float32 logarithm, times and plus a number.
    """
    assert s.config.temperature is not None
    factor = s.config.temperature.of(s.positions)[:, None, None].astype(s.y.dtype)
    return s.given[0].reshape(-1, *s.y.shape) * np.square(factor) + 4 * s.rounding


def _cache(s: Step) -> np.ndarray:
    """Derive the variance of keys or values, earlier tokens first."""
    n_heads, _, head_dim = s.y.shape
    given = rounded(s.given[0], s.x[0], "F16") if s.f16_cache else s.given[0]
    made = given.reshape(len(given), -1, n_heads, head_dim).swapaxes(1, 2)
    return made if s.past is None else np.concatenate([s.past, made], axis=2)


def _scores_variance(s: Step) -> np.ndarray:
    k, head_dim = s.x[1], s.config.head_dim
    q, given = (x.reshape(*x.shape[: x.ndim - s.x[0].ndim + 1], -1, head_dim) for x in (s.x[0], s.given[0]))
    given = rounded(given, q, "F16") if s.f16_cache else given
    given, of_keys = (each + _of_inputs(x, s.arithmetic) for each, x in ((given, q), (s.given[1], k)))
    squared_k = np.square(k).swapaxes(-1, -2)
    queries, errors = _grouped(np.square(q), len(k)), _grouped(given, len(k))
    made = errors @ squared_k + queries @ of_keys.swapaxes(-1, -2) + SUM * head_dim * (queries @ squared_k)
    return made.reshape(-1, *s.y.shape) / head_dim + 2 * s.rounding


def _of_inputs(x: np.ndarray, arithmetic: Arithmetic) -> "np.ndarray | float":
    """Derive the variance that engines add if they round the inputs of all products.

    Engines that round blocks do so only for products with a matrix; for them it is 0.
    """
    return _squared_steps(x, arithmetic.activations) / _ROUNDED if arithmetic.activations in _DIGITS else 0.0


def _grouped(q: np.ndarray, n_kv_heads: int) -> np.ndarray:
    """Group the queries that share a key/value head, (..., kv_heads, group * seq, head_dim)."""
    by_head = q.swapaxes(-3, -2)
    return by_head.reshape(*by_head.shape[:-3], n_kv_heads, -1, by_head.shape[-1])  # (..., kv_heads, group * seq, ...)


def _probs(s: Step) -> np.ndarray:
    """Derive the variance of a softmax.

    The derivative is dp = p (ds - sum(p ds)), where the sum holds the element's own ds too.
    """
    shifted, given = np.where(s.y > 0, s.x[0] - s.x[0].max(axis=-1, keepdims=True), 0), s.given[0]
    squared = np.square(s.y)
    made = (1 - 2 * s.y) * given + (squared * given).sum(axis=-1, keepdims=True)
    own = s.rounding if s.arithmetic.is_half else 0
    return squared * (np.maximum(made, 0) + UNIT**2 * (4 + np.square(shifted))) + own


def _context(s: Step) -> np.ndarray:
    """Derive the variance of the weighted sum of values."""
    probs, v = s.x
    given = rounded(s.given[0], probs, "F16", token_axis=1) if s.f16_cache else s.given[0]
    if s.arithmetic.is_half:  # float32 until they are multiplied
        given = given + s.arithmetic.rounding(probs)
    given, of_values = (each + _of_inputs(x, s.arithmetic) for each, x in ((given, probs), (s.given[1], v)))
    n_kv, ctx, head_dim = v.shape
    p, e = np.square(probs).reshape(n_kv, -1, ctx), given.reshape(len(given), n_kv, -1, ctx)
    common = p @ of_values
    if s.arithmetic.is_half:  # rounded weights are off by the same for all tokens, and so are values of tokens alike
        common[CHAINED] = np.square(np.sqrt(p) @ np.sqrt(of_values[CHAINED]))
    made = e @ np.square(v) + common + SUM * ctx * (p @ np.square(v))
    by_head = made.reshape(len(given), *probs.shape[:2], head_dim).swapaxes(1, 2)
    return by_head.reshape(-1, *s.y.shape) + 2 * s.rounding


def _sum(s: Step) -> np.ndarray:
    """Derive the variance of a residual sum."""
    return s.given[0] + s.given[1] + 2 * s.rounding


def _swiglu_variance(s: Step) -> np.ndarray:
    gate, up = s.x
    with np.errstate(over="ignore"):
        share = 1 / (1 + np.exp(-gate))
    slope = share * (1 + gate * (1 - share))
    made = s.given[0] * np.square(slope * up) + s.given[1] * np.square(gate * share)
    return made + 4 * s.rounding


def _expert_product(s: Step) -> np.ndarray:
    """Derive the variance of each expert's product, over the tokens that the expert was given."""
    (x, ids), given = s.x, s.given[0]
    made = np.empty((len(given), *s.y.shape), x.dtype)
    for expert in np.unique(ids).astype(int):
        tokens, places = np.nonzero(ids == expert)
        at = (tokens,) if x.ndim == 2 else (tokens, places)
        part = replace(s, x=(x[at],), y=s.y[tokens, places], given=(given[:, *at],), divisor=s.divisor[:, tokens])
        made[:, tokens, places] = _product_variance(part, s.weights[s.stage.matrix][expert])
    return made


def _no_error(s: Step) -> np.ndarray:
    """Return zeros: a selection is equal to another or differs from it, see `expert_selection`."""
    return np.zeros_like(s.y)


def _topk_weights(s: Step) -> np.ndarray:
    """Derive the variance of p / sum.

    The derivative is dw = (dp - w sum(dp)) / sum, where the sum holds the weight's own dp too.
    """
    ids = s.x[1].astype(int)
    chosen, given = np.take_along_axis(s.x[0], ids, -1), np.take_along_axis(s.given[0], ids[None], -1)
    assert s.config.experts is not None
    if s.config.experts.scaled_inputs:  # the slope of the sigmoid
        return given * np.square(s.y * (1 - s.y)) + 4 * s.rounding
    if not s.config.experts.norm_topk_prob:
        return given + 2 * s.rounding
    total = chosen.sum(axis=-1, keepdims=True)
    made = (1 - 2 * s.y) * given + np.square(s.y) * given.sum(axis=-1, keepdims=True)
    return np.maximum(made, 0) / np.square(total) + 4 * s.rounding


def _expert_in(s: Step) -> np.ndarray:
    """Derive the variance of inputs multiplied by the weights of their experts."""
    (h, _, weights), (of_h, _, of_weights) = s.x, s.given
    made = np.square(weights)[..., None] * of_h[:, :, None] + np.square(h)[:, None] * of_weights[..., None]
    return made + 2 * s.rounding


def _shared_gate(s: Step) -> np.ndarray:
    """Derive the variance after the sigmoid, whose slope is s (1 - s); llama.cpp divides silu(x) by x."""
    logit = np.log(s.y) - np.log1p(-s.y)
    made = _product_variance(replace(s, y=np.where(np.isfinite(logit), logit, 0)), s.weights["shared_gate"])
    return made * np.square(s.y * (1 - s.y)) + 4 * s.rounding


def _mixed_variance(s: Step) -> np.ndarray:
    """Derive the variance of a sum of products, added one by one."""
    (outs, weights, *shared), (of_outs, of_weights, *of_shared) = s.x, s.given
    if s.config.experts is not None and s.config.experts.scaled_inputs:  # they were multiplied before
        weights, of_weights = np.ones_like(weights), np.zeros_like(of_weights)
    made = (np.square(weights)[..., None] * of_outs + np.square(outs) * of_weights[..., None]).sum(axis=-2)
    terms = np.square(weights[..., None] * outs).sum(axis=-2)
    if shared:
        out, gate = shared if len(shared) == 2 else (shared[0], np.ones_like(weights[:, :1]))
        made += np.square(gate) * of_shared[0] + (np.square(out) * of_shared[1] if len(shared) == 2 else 0)
        terms += np.square(gate * out)
    own = s.arithmetic.unit**2 * (weights.shape[-1] + 1) * terms  # each is rounded, and so is each sum
    return made + own + 4 * s.rounding


def squared_terms(x: np.ndarray, weight: "np.ndarray | QuantMethod") -> np.ndarray:
    """Sum the squared terms of every element of a product."""
    parts = [_squared_terms(x, matrix, minima, np.square(matrix).T) for _, matrix, minima in _row_by_row(weight)]
    return np.concatenate(parts, axis=-1)


def _squared_terms(x: np.ndarray, matrix: np.ndarray, minima: np.ndarray | None, squares: np.ndarray) -> np.ndarray:
    """Sum the squared terms for some rows of a matrix; with minima, ggml's two sums of each block."""
    if minima is None:
        return np.square(x) @ squares
    total, n = np.zeros((len(x), len(matrix)), x.dtype), minima.shape[1] * _BLOCK // matrix.shape[1]
    for block in range(matrix.shape[1] // _BLOCK):
        part = slice(block * _BLOCK, (block + 1) * _BLOCK)
        sums = x[:, part].reshape(len(x), n, -1).sum(axis=-1)
        of_minima = sums @ minima[:, block * n : (block + 1) * n].T
        total += np.square(x[:, part] @ matrix[:, part].T - of_minima) + np.square(of_minima)
    return total


_RULES: Mapping[str, Callable[[Step], np.ndarray]] = MappingProxyType(
    {
        "embed": _embed,
        "q_rope": _rope_variance,
        "k_rope": _rope_variance,
        "q_head_norm": _normed,
        "k_head_norm": _normed,
        "q_tempered": _tempered_variance,
        "k_cache": _cache,
        "v_cache": _cache,
        "attn_scores": _scores_variance,
        "attn_probs": _probs,
        "attn_context": _context,
        "attn_residual": _sum,
        "block_out": _sum,
        "router_probs": _probs,
        "topk_ids": _no_error,
        "topk_weights": _topk_weights,
        "expert_in": _expert_in,
        "shared_gate": _shared_gate,
        "moe_out": _mixed_variance,
        **dict.fromkeys(("ffn_act", "expert_act", "shared_ffn_act"), _swiglu_variance),
        **dict.fromkeys(("attn_norm", "ffn_norm", "final_norm", "q_norm", "k_norm"), _norm_variance),
        **OF_DELTA_NETS,
        **{stage.name: _expert_product if stage.by_expert else _product for stage in STAGES if stage.matrix},
    }
)
