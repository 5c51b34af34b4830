"""Tolerances of every comparison of the forward pass, derived from rounding errors.

Mathematics (float64)
    llorch must be within `MATHEMATICS` of the float64 reference. A pass of one token, whose terms may cancel, may use
    2**-29 of its float32 tolerance if that is more, but at most the tolerance of one token among others.

Arithmetic (every other dtype)
    The tolerance of a stage is the larger of
    - the rounding cost, derived from the golden's numbers only;
    - 4 times the engines' largest distance from the float64 reference at this stage, over all layers. Distance that
      rounding does not explain adds nothing.
    In half precision, isolated stages also have a tolerance for a common factor of all values: `limit_of_factor`.

Propagation
    A stage adds an error (another order of a sum, a few roundings, a float32 angle) and passes on its inputs' errors.
    Errors of elements are small and count as independent, so variances propagate element by element, times squared
    derivatives at the golden's values: y = x @ w.T gives var(x) @ (w * w).T. A rounding counts for each of the two
    compared runs, so a rule adds 2 * rounding for one operation and 4 * rounding for two.

    Under ggml numerics, products round their inputs to integer codes, as in llama.cpp. A value flips if both runs round
    it to different codes, which are one step apart. Runs propagated together:

    ISOLATED  inputs are the golden's, rounded to the dtype of the run
    CHAINED   inputs are llorch's; under ggml numerics flipped values are replaced by the golden's
    FREE      ggml numerics, no flip is replaced: an error e flips a code with probability e / step and costs one step

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
    lane, with errors up to 2.5 times as large; the factor 4 covers them. For engines that llorch does not run, scores,
    probabilities and contexts also have the variance of `one_lane`.

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
from llorch.judging.tolerances.delta_nets import select_half
from llorch.judging.tolerances.factors import limit_of_factor
from llorch.judging.tolerances.one_lane import SCORES as ONE_LANE_SCORES
from llorch.judging.tolerances.one_lane import context_variance, denominator_variance
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
    RuleInput,
)
from llorch.ops.numerics import QuantMethod
from llorch.ops.rounding import BLOCK_SIZE, ActivationKind
from llorch.stages.comparison import EXACT, FACTOR, FLOOR, Difference, Tolerance
from llorch.stages.stage_ref import Pass, part_of, token_axis
from llorch.stages.table import STAGES, Stage, input_keys, key, keys, matrix_of

_TOKEN_ERROR = 1e-11  # larger than for a tensor, because a token is a part of it
MATHEMATICS = Tolerance(1e-12, 1e-11, _TOKEN_ERROR)  # 4500 times the error of one rounding
WORST = 4  # tolerance of one element over the tolerance of its row
CACHES = frozenset({"k_cache", "v_cache"})
STATES = {  # stage -> state of the earlier passes that it reads
    "conv_state": "conv_state", "conv_out": "conv_state", "delta_state": "delta_state", "delta_out": "delta_state",
}  # fmt: skip
NORMS = frozenset({"attn_norm", "ffn_norm", "final_norm"})  # their outputs go into products
SCORES = frozenset({"attn_scores", "attn_probs"})  # stages that fused attention hides; always at least float32
_DIGITS = {"F16": 11, "BF16": 8}  # binary digits; the step of a number between 2^e and 2^(e+1) is 2^(e+1-digits)
_CODES = 127  # largest code of a block, see `ops.rounding`
_FLOAT64 = 2.0**-29  # error of a float64 rounding over the error of a float32 rounding
_ROUNDED = 12  # squared step over the variance of a rounding, whose error is uniform within half a step
_BLOCK = 32  # columns of a block whose minima ggml multiplies by sums of x


def variances(
    weights: Weights,
    inputs: Pass,
    fed: Mapping[str, np.ndarray],
    arithmetic: Callable[[str], Arithmetic] = lambda key: FLOAT32,
    *,
    made: Mapping[str, np.ndarray] | None = None,
    hidden: Container[str] = frozenset(),
    stored: bool = False,
    past: Mapping[str, np.ndarray] = MappingProxyType({}),
    states: Mapping[str, np.ndarray] = MappingProxyType({}),
    one_lane: bool = False,
) -> Iterator[tuple[str, np.ndarray]]:
    """Derive the expected squared differences of two correct runs.

    Args:
        weights: The model, with its numerics.
        inputs: The tokens of the pass.
        fed: Input arrays of the stages: a golden or an engine's dump. They are read stage by stage.
        arithmetic: Arithmetic of the run, by trace key.
        made: Output arrays that the stages computed from `fed`; None if `fed` has them, too.
        hidden: Trace keys that an isolated run computes instead of reading them from `fed`.
        stored: True if `fed` was rounded when it was dumped, and `made` was computed before that rounding.
        past: Variances of the contents of the caches before this pass, by trace key; empty for an empty cache.
        states: States of delta nets before this pass, by trace key; empty for an empty cache.
        one_lane: True if one of the two runs may add all keys one by one.

    Yields:
        Trace key, and variances (runs, *shape of the stage): ISOLATED, CHAINED and, under ggml numerics, FREE.
    """
    config, n_runs = weights.config, 3 if weights.numerics.rounds_activations else 2
    made, passed, divisor = fed if made is None else made, dict[str, np.ndarray](), np.zeros((n_runs, 1, 1), np.float32)
    denominators = np.zeros((n_runs, 1, 1, 1), np.float32) if one_lane else None
    for name, stage, layer in keys(config):
        input_names, state_name = input_keys(stage, layer, config), STATES.get(stage.name)
        rule_input = RuleInput(
            stage, config, weights if layer is None else weights.layer(layer), inputs.positions,
            tuple(_finite(fed[name], masked=name.endswith("attn_scores")) for name in input_names),
            _finite(made[name], masked=stage.masked), tuple(passed[name] for name in input_names), arithmetic(name),
            weights.cache_dtype is np.float16, divisor, past.get(key(state_name or stage.name, layer)),
            states.get(key(state_name or "", layer)), denominators,
        )  # fmt: skip
        variance = _RULES[stage.name](rule_input)
        if stage.name in CACHES and arithmetic(name) != arithmetic(input_names[0]):
            variance = variance + rule_input.rounding  # the cache is rounded to its own dtype
        variance = np.broadcast_to(variance, (n_runs, *made[name].shape))
        yield name, variance
        if stage.name in NORMS:
            divisor = _divisor_variance(rule_input)  # until the next norm
        if stage.name == "attn_probs" and one_lane:
            denominators = np.stack([denominator_variance(rule_input.y)] * n_runs)
            denominators[ISOLATED] *= name in hidden  # an isolated context reads the engine's probabilities
        if stage.name == "block_out":
            passed.clear()  # the next layer reads `block_out` only
        passed[name] = _input_variances(rule_input, variance, hidden=name in hidden, stored=stored)


def _finite(array: np.ndarray, *, masked: bool) -> np.ndarray:
    """Convert to float32, which is enough for a tolerance; set masked values to 0, so that they add no variance."""
    array = array.astype(np.float32, copy=False)
    return np.where(np.isneginf(array), np.float32(0), array) if masked else array


def _input_variances(s: RuleInput, variance: np.ndarray, *, hidden: bool, stored: bool) -> np.ndarray:
    """Return the variances of a stage as an input of later stages; an isolated stage reads the golden, rounded."""
    if hidden:
        return variance
    passed = variance.copy()
    passed[ISOLATED] = s.rounding if stored or s.arithmetic.is_half else 0
    return passed


class ForwardTolerances:
    """Tolerances of one case (input) in one arithmetic, derived on demand, in the order of the forward pass."""

    def __init__(
        self,
        weights: Weights,
        inputs: Pass,
        golden: Mapping[str, np.ndarray],
        arithmetic: Arithmetic = FLOAT32,
        *,
        fused: bool = False,
        distance: Callable[[str, str], Difference | None] = lambda mode, stage: None,
    ) -> None:
        """Prepare the tolerances of a model with its numerics, for the tokens and the whole trace of a golden.

        `fused`: an isolated run computes scores and probabilities instead of reading the golden's. `distance` returns
        the engines' largest distance from the float64 reference, by mode and stage.
        """
        self._stages = {name: stage for name, stage, _ in keys(weights.config)}
        self._golden, self._distance, self._config = golden, distance, weights.config
        self._arithmetic, self._fused = arithmetic, fused
        self._isolated: dict[str, Tolerance] = {}
        self._chained: dict[str, np.ndarray] = {}
        self._tolerances: dict[tuple[str, int], Tolerance] = {}  # cache of `chained`
        self._free = np.empty(0)
        scores = {name for name, stage in self._stages.items() if stage.name in SCORES}
        by_key = lambda name: FLOAT32 if name in scores else arithmetic  # noqa: E731 (scores are float32)
        self._steps = variances(weights, inputs, golden, by_key, hidden=scores if fused else ())

    def _derive_up_to(self, name: str) -> None:
        while name not in self._isolated:
            with np.errstate(all="ignore"):  # a golden that is not finite fails in its comparison
                derived, variance = next(self._steps)
                self._isolated[derived] = self._limit_isolated(derived, variance[ISOLATED])
            self._chained[derived] = variance[CHAINED].copy()
            if len(variance) > FREE:
                self._free = variance[FREE] / 4  # half of FACTOR: all flips that can occur are counted

    def _limit_isolated(self, name: str, variance: np.ndarray) -> Tolerance:
        """Derive an isolated tolerance; in half precision, also limit a common factor, or 1.01 * y would pass."""
        stage, golden = self._stages[name], self._golden[name]
        tolerance = derive_tolerance(golden, variance, stage)
        if not self._arithmetic.is_half or tolerance == EXACT:
            return tolerance
        factor = limit_of_factor(golden, variance, stage, self._config, self._arithmetic, fused=self._fused)
        return replace(tolerance, common_factor=factor)

    def chained_variance(self, name: str) -> np.ndarray:
        """Return the variance of every element of a chained stage."""
        self._derive_up_to(name)
        return self._chained[name]

    @property
    def free_variances(self) -> np.ndarray:
        """Variances of the logits of a run in which no flip was replaced."""
        self._derive_up_to("logits")
        return self._free

    def isolated(self, name: str) -> Tolerance:
        """Return the tolerance of a stage that reads the golden's inputs."""
        self._derive_up_to(name)
        return self._widen(self._isolated[name], "isolated", name)

    def chained(self, name: str, start: int = 0) -> Tolerance:
        """Return the tolerance of a stage that reads llorch's inputs, for the tokens from `start` on."""
        if (name, start) not in self._tolerances:
            self._tolerances[name, start] = self._widen(self._derived(name, start), "chained", name)
        return self._tolerances[name, start]

    def in_float64(self, name: str, start: int = 0) -> Tolerance:
        """Return the tolerance in float64, `MATHEMATICS`; for a pass of one token it may be larger, see the preface."""
        if start < len(self._golden["embed"]) - 1:
            return MATHEMATICS
        error = min(_TOKEN_ERROR, _FLOAT64 * self._derived(name, start).error)
        return MATHEMATICS.at_least(Tolerance(error, 0.0))

    def _derived(self, name: str, start: int) -> Tolerance:
        """Return the chained tolerance from rounding alone, for the tokens from `start` on."""
        stage, stop = self._stages[name], len(self._golden["embed"])
        arrays = self._golden[name], self.chained_variance(name)
        golden, variance = (part_of(stage, array, start, stop) for array in arrays)
        return derive_tolerance(golden, variance, stage)

    def last_row(self) -> Tolerance:
        """Return the tolerance of the last token's logits, which sampling reads."""
        return self._widen(self._last(self.chained_variance("logits")), "chained", "selected_logits")

    def free(self) -> Tolerance:
        """Return the tolerance of the logits of a run in which no flip was replaced."""
        return derive_tolerance(self._golden["logits"], self.free_variances, self._stages["logits"])

    def free_last_row(self) -> Tolerance:
        """Return the tolerance of the last row of logits of a run in which no flip was replaced."""
        return self._last(self.free_variances)

    def largest_swap(self) -> float:
        """Return the largest gap between two logits whose order rounding can swap, in root mean squares of the row."""
        variance, logits = self.chained_variance("logits"), self._golden["logits"]
        shares = variance.mean(axis=-1) / np.square(logits, dtype=np.float64).mean(axis=-1)
        return FACTOR * math.sqrt(4 * float(shares.max()))

    def _last(self, variances: np.ndarray) -> Tolerance:
        """Return the tolerance of the last token's logits from their variances."""
        tolerance = derive_tolerance(self._golden["logits"][-1:], variances[-1:], self._stages["logits"])
        return Tolerance(tolerance.error, tolerance.worst)

    def _widen(self, tolerance: Tolerance, mode: str, name: str) -> Tolerance:
        return widen(tolerance, self._distance(mode, self._stages[name].name if name in self._stages else name))


def widen(tolerance: Tolerance, distance: Difference | None) -> Tolerance:
    """Widen a tolerance to 4 times the reference engines' distance from the float64 reference, if that is more.

    The factor is at most 4: a distance beyond the tolerance is an error of the engine, not of rounding.
    """
    if distance is None or tolerance == EXACT:
        return tolerance
    return tolerance.times(FACTOR * min(1.0, max(1 / FACTOR, distance.over(tolerance))))


@dataclass(frozen=True)
class Margins:
    """Near-ties of a greedy text: gaps between logits that rounding may close, computed without llorch's logits.

    Attributes:
        logits: Logits of each token of a text, (tokens, vocab); None: no near-tie is accepted.
        text: Token ids to which the logits belong; None: the golden's.
        moved: Effect of rounding: variances of the logits, or the largest gap that it closes, see `largest_swap`.
    """

    logits: np.ndarray | None
    text: np.ndarray | None
    moved: "np.ndarray | float"

    def of(self, expected: np.ndarray, index: int, token: int) -> tuple[float, float]:
        """Measure how far the less likely of llorch's `token` and the golden's `expected[index]` is below the best one.

        Return this gap, and the gap that rounding may close, in root mean squares of the logits. The gap is infinite if
        a token is invalid or its row has no logits. Float32 angles of RoPE have errors of up to position * 2^-24.
        """
        pair = [token, int(expected[index])]
        is_prefix = self.text is None or np.array_equal(expected[:index], self.text[:index])
        if self.logits is None or not is_prefix or not all(0 <= token_id < self.logits.shape[-1] for token_id in pair):
            return math.inf, 0.0
        row = self.logits[index].astype(np.float64)
        size = float(np.sqrt(np.square(row).mean()))
        gap = float(row.max() - row[pair].min()) / size
        if isinstance(self.moved, np.ndarray):
            return gap, FACTOR * math.sqrt(2 * float(self.moved[index][pair].sum())) / size
        return gap, self.moved + index * 2.0**-24


NO_TIES = Margins(None, None, 0.0)  # every differing token is an error


def derive_tolerance(golden: np.ndarray, variance: np.ndarray, stage: Stage) -> Tolerance:
    """Derive the tolerances of an array, of its worst element and of each of its tokens.

    `variance` has the variances of these elements in one run, such as ISOLATED. If all are 0, the tolerance is exact.
    """
    if not variance.any():
        return EXACT
    finite = np.where(np.isfinite(golden), golden, 0).astype(np.float64)
    axis_of_tokens = token_axis(stage)
    axes = tuple(axis for axis in range(golden.ndim) if axis != axis_of_tokens)
    token_variances, largest = variance.sum(axis=axes, dtype=np.float64), WORST**2 * variance.max(axis=axes)
    sizes = np.square(finite).sum(axis=axes)
    error = FACTOR * math.sqrt(max(token_variances.sum(), largest.max()) / (sizes.sum() or 1.0))
    worst = largest_errors(variance).max() / (np.abs(finite).max() or 1.0)
    token_variances = np.maximum(token_variances, largest) / np.where(sizes > 0, sizes, 1.0)
    tokens = None if axis_of_tokens is None else FACTOR * np.sqrt(token_variances)
    return Tolerance(float(error), float(worst), tokens).at_least(Tolerance(FLOOR, FLOOR, FLOOR))


def largest_errors(variance: np.ndarray) -> np.ndarray:
    """Derive the largest allowed error of every element."""
    return WORST * FACTOR * np.sqrt(variance + variance.mean(axis=-1, keepdims=True))


def limit_of_softmax(vocab_size: int) -> Tolerance:
    """Derive the tolerance of a softmax: a float32 sum of `vocab_size` terms, added one by one, and an exponential."""
    error = FACTOR * UNIT * math.sqrt(vocab_size / 6 + 4)
    return Tolerance(error, WORST * error).at_least(Tolerance(FLOOR, FLOOR))


def top_p_error(vocab_size: int) -> float:
    """Derive the effect of rounding on the cumulative sum of probabilities that top-p sampling compares with p.

    Engines sum float32 probabilities. The n partial sums of this sum, and of the normalizing sum, are each rounded by
    up to 2^-24. The mean effect is 2^-24 * sqrt(2n / 3), and the tolerance is 4 times that.
    """
    return FACTOR * UNIT * math.sqrt(2 * vocab_size / 3)


def product_error(x: np.ndarray, weight: "np.ndarray | QuantMethod", y: np.ndarray, arithmetic: Arithmetic) -> float:
    """Derive the largest relative error of an isolated product; half precision also rounds inputs and weights."""
    terms = float(squared_terms(x, weight).sum(dtype=np.float64))
    size = float(np.square(y, dtype=np.float64).sum()) or 1.0
    error = x.shape[-1] * (SUM * terms + DRIFT * size) + 2 * (arithmetic.unit**2 * terms if arithmetic.is_half else 0.0)
    return max(FLOOR, FACTOR * math.sqrt(error / size + 2 * arithmetic.unit**2))


def round_variance(variance: np.ndarray, x: np.ndarray, kind: ActivationKind, *, token_axis: int = 0) -> np.ndarray:
    """Derive the variances after a rounding to codes: an error disappears unless it moves a value over an edge."""
    if kind == "F32":
        return variance
    rounded_variance = np.zeros_like(variance)
    other_axes = tuple(axis for axis in range(x.ndim) if axis != token_axis)
    for run in (ISOLATED, FREE):  # ISOLATED is 0 except for hidden inputs; in CHAINED, flips are replaced
        rounded_variance[run] = _add_flips(variance[run], _squared_steps(x, kind), other_axes)
    return rounded_variance


def _squared_steps(x: np.ndarray, kind: ActivationKind) -> np.ndarray:
    """Compute the squared step of the code to which each value is rounded."""
    blocks = x.reshape(-1, BLOCK_SIZE.get(kind, 1))
    if kind in _DIGITS:
        step = np.exp2(np.frexp(blocks)[1].astype(x.dtype) - _DIGITS[kind])
    else:
        step = np.abs(blocks).max(axis=-1, keepdims=True) / _CODES * np.ones_like(blocks)
    return np.square(step).reshape(x.shape)


def _add_flips(variance: np.ndarray, cost: np.ndarray, token_axes: tuple[int, ...]) -> np.ndarray:
    """Add the effect of flips to the variance of the error.

    `cost` is the squared step, which a flip adds; `token_axes` are the axes of the values of one token. Flips add at
    most the variance of two random roundings, cost / 6.
    """
    mean = np.sqrt(2 / np.pi * variance * cost)  # the mean of |e| / step, times the squared step
    total, spread = (part.sum(axis=token_axes, keepdims=True, dtype=np.float64) for part in (mean, mean * cost))
    tolerance = total + 4 * np.sqrt(spread) + 4 * cost.max(axis=token_axes, keepdims=True)
    share = np.divide(tolerance, total, out=np.zeros_like(total), where=total > 0).astype(cost.dtype)
    return variance + np.minimum(share * mean, cost / 6)


def _embed(s: RuleInput) -> np.ndarray:
    """Derive the variance of embedding rows: 0 except in half precision."""
    return s.rounding if s.arithmetic.is_half else np.zeros_like(s.y)


def _norm_variance(s: RuleInput) -> np.ndarray:
    variance = _head_norm_variance(select_half(s), s.weights[s.stage.name])
    return variance + _divisor_variance(s) * np.square(s.y) if s.stage.name in NORMS else variance


def _divisor_variance(s: RuleInput) -> np.ndarray:
    """Derive the relative variance of a norm's divisor from the errors of its inputs: one number for each token.

    Where one channel is much larger than all others, its error alone moves the divisor, and with it the whole token.
    """
    squares = np.square(s.x[0])
    mean_square = squares.mean(axis=-1, keepdims=True) + squares.dtype.type(s.config.rms_norm_eps)
    variance = (squares * s.variances[0]).mean(axis=-1, keepdims=True) / squares.shape[-1]
    return variance / np.square(mean_square)


def _head_norm_variance(s: RuleInput, gain: "np.ndarray | float" = 1.0) -> np.ndarray:
    """Derive the variance after a norm; the head norm of Llama 4 has no gain."""
    x = s.x[0].reshape(s.y.shape)
    var_x = s.variances[0].reshape(-1, *s.y.shape)
    mean_square = np.square(x).mean(axis=-1, keepdims=True) + x.dtype.type(s.config.rms_norm_eps)
    rounding = 2 * s.rounding + SQUARES * s.y.shape[-1] * np.square(s.y)
    return var_x * np.square(gain) / mean_square + rounding


def _product(s: RuleInput) -> np.ndarray:
    """Derive the variance of a product with a matrix."""
    return _product_variance(s, s.weights[matrix_of(s.stage, s.config)])


def _product_variance(s: RuleInput, weight: "np.ndarray | QuantMethod") -> np.ndarray:
    """Sum the variances of a matrix product from its inputs, from their rounding and from the sums."""
    x = s.x[0]
    kind: ActivationKind = weight.activations if isinstance(weight, QuantMethod) else "F32"  # pyright: ignore
    var_x = round_variance(s.variances[0], x, kind)
    if s.arithmetic.activations != "F32":
        var_x = var_x + _squared_steps(x, s.arithmetic.activations) / _ROUNDED
    variance, terms = np.empty((len(var_x), *s.y.shape), x.dtype), np.empty_like(s.y, x.dtype)
    for rows, matrix, minima in _row_tiles(weight):
        squares = np.square(matrix).T
        variance[..., rows] = (var_x.reshape(-1, x.shape[-1]) @ squares).reshape(*var_x.shape[:2], -1)
        if kind == "Q8_K":
            variance[..., rows] += _scale_effect(s.variances[0], x, matrix)
        terms[:, rows] = _squared_terms(x, matrix, minima, squares)
    variance += _divisor_effect(s)
    if s.arithmetic.is_half:  # the weights are rounded, too
        variance += s.arithmetic.unit**2 * terms + s.arithmetic.smallest**2 * np.square(x).sum(axis=-1, keepdims=True)
    return variance + x.shape[-1] * (SUM * terms + DRIFT * np.square(s.y)) + 2 * s.rounding


def _row_tiles(weight: "np.ndarray | QuantMethod") -> Iterator[tuple[slice, np.ndarray, np.ndarray | None]]:
    """Yield tiles of a matrix's rows: their slice, the rows, and the minimum of every block; None without minima."""
    matrix = weight.dequantize() if isinstance(weight, QuantMethod) else weight
    minima = None
    if isinstance(weight, Matrix) and weight.packed.ggml_type in MINIMA:
        minima = weight.in_order(decode_minima(weight.packed.raw, weight.packed.ggml, weight.packed.shape))
    n_rows = max(1, TILE // matrix.shape[1])
    for start in range(0, len(matrix), n_rows):
        rows = slice(start, start + n_rows)
        yield rows, matrix[rows], None if minima is None else minima[rows]


def _divisor_effect(s: RuleInput) -> np.ndarray:
    """Derive the variance from the relative error of the last norm's divisor, which moves a whole row.

    Its square is multiplied by 4, because the product gate * up contains the error twice. It is 0 for isolated stages.
    """
    variance = np.square(s.y) * 4 * (2 * UNIT**2 + SQUARES * s.config.hidden_size + s.divisor)
    variance[ISOLATED] = 0
    return variance


def _scale_effect(var_x: np.ndarray, x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Derive the variance from the float32 scale of Q8_K, a kind of block to which products round their inputs.

    This scale is not rounded further, so a whole block moves with the error of its largest value: two divisions compute
    the scale from that value, and the last bit of the value moves the block by a few bits.
    """
    variance = np.zeros((len(var_x), len(x), len(matrix)), x.dtype)
    for start in range(0, x.shape[1], BLOCK_SIZE["Q8_K"]):
        block = slice(start, start + BLOCK_SIZE["Q8_K"])
        largest = np.abs(x[:, block]).argmax(axis=-1)[:, None]
        size = np.square(np.take_along_axis(x[:, block], largest, -1))
        relative = np.take_along_axis(var_x[..., block], largest[None], -1) / np.where(size, size, 1)
        variance += relative * np.square(x[:, block] @ matrix[:, block].T)
    return variance


def _rope_variance(s: RuleInput) -> np.ndarray:
    """Derive the variances after RoPE, which mixes the errors of the two values of a pair.

    The angle is the position times j equal float32 factors. Their common error of half a step counts j times, the
    independent roundings of the products sqrt(j) times. RoPE scaling only slows the rotation and adds a few roundings
    (3), relative to the angle; cosine and sine add a few more (2).
    """
    half = s.config.rotated // 2
    j = np.arange(half)
    turns = s.positions[:, None] * s.config.rope_theta ** (-j / half)  # (seq, half)
    angle = (turns * (j + np.sqrt(j) + 3) + 2) * UNIT / FACTOR  # divided, because the tolerance multiplies a bound
    x, var_x = s.x[0].reshape(s.y.shape), s.variances[0].reshape(-1, *s.y.shape)
    halves, neighbours = (slice(half), slice(half, 2 * half)), (slice(0, None, 2), slice(1, None, 2))
    first, second = neighbours if s.config.interleaved_rope_hf else halves
    var_pair = var_x[..., first] + var_x[..., second]
    var_pair = var_pair + (np.square(x[..., first]) + np.square(x[..., second])) * np.square(angle)[:, None, :]
    variance = np.empty(var_x.shape, s.y.dtype)
    variance[..., first] = variance[..., second] = var_pair
    variance[..., : 2 * half] += 2 * s.rounding[..., : 2 * half]
    variance[..., 2 * half :] = var_x[..., 2 * half :]  # partial rotary: these dimensions are not rotated
    return variance


def _tempered_variance(s: RuleInput) -> np.ndarray:
    """Derive the variance after the attention temperature, an affine function of a float32 logarithm."""
    assert s.config.temperature is not None
    factor = s.config.temperature.of(s.positions)[:, None, None].astype(s.y.dtype)
    return s.variances[0].reshape(-1, *s.y.shape) * np.square(factor) + 4 * s.rounding


def _cache(s: RuleInput) -> np.ndarray:
    """Derive the variance of cached keys or values, earlier tokens first."""
    n_heads, _, head_dim = s.y.shape
    var_x = round_variance(s.variances[0], s.x[0], "F16") if s.f16_cache else s.variances[0]
    new = var_x.reshape(len(var_x), -1, n_heads, head_dim).swapaxes(1, 2)
    return new if s.past is None else np.concatenate([s.past, new], axis=2)


def _scores_variance(s: RuleInput) -> np.ndarray:
    k, head_dim = s.x[1], s.config.head_dim
    q, var_q = (x.reshape(*x.shape[: x.ndim - s.x[0].ndim + 1], -1, head_dim) for x in (s.x[0], s.variances[0]))
    var_q = round_variance(var_q, q, "F16") if s.f16_cache else var_q
    var_q, var_k = (var + _input_rounding(x, s.arithmetic) for var, x in ((var_q, q), (s.variances[1], k)))
    squared_k = np.square(k).swapaxes(-1, -2)
    queries, grouped_var_q = _group_queries(np.square(q), len(k)), _group_queries(var_q, len(k))
    variance = grouped_var_q @ squared_k + queries @ var_k.swapaxes(-1, -2) + SUM * head_dim * (queries @ squared_k)
    in_one_lane = ONE_LANE_SCORES * head_dim * np.square(s.y) if s.one_lane else 0.0
    return variance.reshape(-1, *s.y.shape) / head_dim + in_one_lane + 2 * s.rounding


def _input_rounding(x: np.ndarray, arithmetic: Arithmetic) -> "np.ndarray | float":
    """Derive the variance of rounded inputs of attention products; engines that round blocks do not round these."""
    return _squared_steps(x, arithmetic.activations) / _ROUNDED if arithmetic.activations in _DIGITS else 0.0


def _group_queries(q: np.ndarray, n_kv_heads: int) -> np.ndarray:
    """Group the queries that share a key/value head, (..., kv_heads, group * seq, head_dim)."""
    by_head = q.swapaxes(-3, -2)
    return by_head.reshape(*by_head.shape[:-3], n_kv_heads, -1, by_head.shape[-1])  # (..., kv_heads, group * seq, ...)


def _probs(s: RuleInput) -> np.ndarray:
    """Derive the variance of a softmax: dp = p (ds - sum(p ds)), where the sum holds the element's own ds, too."""
    shifted, var_scores = np.where(s.y > 0, s.x[0] - s.x[0].max(axis=-1, keepdims=True), 0), s.variances[0]
    squared = np.square(s.y)
    variance = (1 - 2 * s.y) * var_scores + (squared * var_scores).sum(axis=-1, keepdims=True)
    variance = np.maximum(variance, 0) + (denominator_variance(s.y) if s.one_lane else 0.0)
    rounding = s.rounding if s.arithmetic.is_half else 0
    return squared * (variance + UNIT**2 * (4 + np.square(shifted))) + rounding


def _context(s: RuleInput) -> np.ndarray:
    """Derive the variance of the weighted sum of values."""
    probs, v = s.x
    var_probs = round_variance(s.variances[0], probs, "F16", token_axis=1) if s.f16_cache else s.variances[0]
    if s.arithmetic.is_half:  # probabilities are float32 until the product
        var_probs = var_probs + s.arithmetic.rounding(probs)
    var_probs, var_v = (var + _input_rounding(x, s.arithmetic) for var, x in ((var_probs, probs), (s.variances[1], v)))
    n_kv, ctx, head_dim = v.shape
    p, e = np.square(probs).reshape(n_kv, -1, ctx), var_probs.reshape(len(var_probs), n_kv, -1, ctx)
    common = p @ var_v
    if s.arithmetic.is_half:  # rounded weights move similar values of all tokens equally, so errors add with one sign
        common[CHAINED] = np.square(np.sqrt(p) @ np.sqrt(var_v[CHAINED]))
    variance = e @ np.square(v) + common + SUM * ctx * (p @ np.square(v))
    if s.denominators is not None:
        y = s.y.reshape(len(s.y), -1, head_dim).swapaxes(0, 1).reshape(n_kv, -1, head_dim)
        variance += context_variance(probs.reshape(n_kv, -1, ctx), v, y)
        variance += s.denominators.reshape(len(variance), n_kv, -1, 1) * np.square(y)
    by_head = variance.reshape(len(var_probs), *probs.shape[:2], head_dim).swapaxes(1, 2)
    return by_head.reshape(-1, *s.y.shape) + 2 * s.rounding


def _sum(s: RuleInput) -> np.ndarray:
    """Derive the variance of a residual sum."""
    return s.variances[0] + s.variances[1] + 2 * s.rounding


def _swiglu_variance(s: RuleInput) -> np.ndarray:
    gate, up = s.x
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-gate))
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    variance = s.variances[0] * np.square(slope * up) + s.variances[1] * np.square(gate * sigmoid)
    return variance + 4 * s.rounding


def _expert_product(s: RuleInput) -> np.ndarray:
    """Derive the variance of each expert's product, for the tokens routed to the expert."""
    (x, ids), var_x = s.x, s.variances[0]
    variance = np.empty((len(var_x), *s.y.shape), x.dtype)
    for expert in np.unique(ids).astype(int):
        tokens, slots = np.nonzero(ids == expert)
        rows = (tokens,) if x.ndim == 2 else (tokens, slots)
        part = replace(
            s, x=(x[rows],), y=s.y[tokens, slots], variances=(var_x[:, *rows],), divisor=s.divisor[:, tokens]
        )
        variance[:, tokens, slots] = _product_variance(part, s.weights[s.stage.matrix][expert])
    return variance


def _no_error(s: RuleInput) -> np.ndarray:
    """Return zeros: selected experts are compared as a set, see `judging.expert_selection`."""
    return np.zeros_like(s.y)


def _topk_weights(s: RuleInput) -> np.ndarray:
    """Derive the variance of w = p / sum: dw = (dp - w sum(dp)) / sum, where sum(dp) holds the weight's own dp, too."""
    ids = s.x[1].astype(int)
    chosen, var_chosen = np.take_along_axis(s.x[0], ids, -1), np.take_along_axis(s.variances[0], ids[None], -1)
    assert s.config.experts is not None
    if s.config.experts.scaled_inputs:  # the slope of the sigmoid
        return var_chosen * np.square(s.y * (1 - s.y)) + 4 * s.rounding
    if not s.config.experts.norm_topk_prob:
        return var_chosen + 2 * s.rounding
    total = chosen.sum(axis=-1, keepdims=True)
    variance = (1 - 2 * s.y) * var_chosen + np.square(s.y) * var_chosen.sum(axis=-1, keepdims=True)
    return np.maximum(variance, 0) / np.square(total) + 4 * s.rounding


def _expert_in(s: RuleInput) -> np.ndarray:
    """Derive the variance of inputs multiplied by the weights of their experts."""
    (h, _, weights), (var_h, _, var_weights) = s.x, s.variances
    variance = np.square(weights)[..., None] * var_h[:, :, None] + np.square(h)[:, None] * var_weights[..., None]
    return variance + 2 * s.rounding


def _shared_gate(s: RuleInput) -> np.ndarray:
    """Derive the variance after the sigmoid s of a logit x, with slope s (1 - s); llama.cpp divides silu(x) by x."""
    logit = np.log(s.y) - np.log1p(-s.y)
    variance = _product_variance(replace(s, y=np.where(np.isfinite(logit), logit, 0)), s.weights["shared_gate"])
    return variance * np.square(s.y * (1 - s.y)) + 4 * s.rounding


def _mixed_variance(s: RuleInput) -> np.ndarray:
    """Derive the variance of a sum of products, added one by one."""
    (outs, weights, *shared), (var_outs, var_weights, *var_shared) = s.x, s.variances
    if s.config.experts is not None and s.config.experts.scaled_inputs:  # weights are already in the experts' inputs
        weights, var_weights = np.ones_like(weights), np.zeros_like(var_weights)
    variance = (np.square(weights)[..., None] * var_outs + np.square(outs) * var_weights[..., None]).sum(axis=-2)
    terms = np.square(weights[..., None] * outs).sum(axis=-2)
    if shared:
        out, gate = shared if len(shared) == 2 else (shared[0], np.ones_like(weights[:, :1]))
        variance += np.square(gate) * var_shared[0] + (np.square(out) * var_shared[1] if len(shared) == 2 else 0)
        terms += np.square(gate * out)
    sum_variance = s.arithmetic.unit**2 * (weights.shape[-1] + 1) * terms  # each term and each partial sum is rounded
    return variance + sum_variance + 4 * s.rounding


def squared_terms(x: np.ndarray, weight: "np.ndarray | QuantMethod") -> np.ndarray:
    """Sum the squared terms of every element of a product."""
    parts = [_squared_terms(x, matrix, minima, np.square(matrix).T) for _, matrix, minima in _row_tiles(weight)]
    return np.concatenate(parts, axis=-1)


def _squared_terms(x: np.ndarray, matrix: np.ndarray, minima: np.ndarray | None, squares: np.ndarray) -> np.ndarray:
    """Sum the squared terms for some rows of a matrix; with minima, the squares of ggml's two sums of each block."""
    if minima is None:
        return np.square(x) @ squares
    total, n_minima = np.zeros((len(x), len(matrix)), x.dtype), minima.shape[1] * _BLOCK // matrix.shape[1]
    for block in range(matrix.shape[1] // _BLOCK):
        part = slice(block * _BLOCK, (block + 1) * _BLOCK)
        sums = x[:, part].reshape(len(x), n_minima, -1).sum(axis=-1)
        minima_sum = sums @ minima[:, block * n_minima : (block + 1) * n_minima].T
        total += np.square(x[:, part] @ matrix[:, part].T - minima_sum) + np.square(minima_sum)
    return total


_RULES: Mapping[str, Callable[[RuleInput], np.ndarray]] = MappingProxyType(
    {
        "embed": _embed,
        "q_rope": _rope_variance,
        "k_rope": _rope_variance,
        "q_head_norm": _head_norm_variance,
        "k_head_norm": _head_norm_variance,
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
