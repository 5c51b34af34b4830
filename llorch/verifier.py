"""Verification of one model: every checkpoint, every stage and layer, against each producer and the float64 truth.

Two questions are kept apart. *Mathematics*: ours in float64 is compared with the truth, which transformers computes
(`llorch.truth`), at 1e-12; a constant that is wrong by a millionth shows. *Arithmetic*: ours in float32 is compared
with every golden. The tolerance is 4 times the larger distance of the producers from the truth, or what another order
of the sums may cost where that is more, but never above a ceiling. No limit is made of numbers that we computed.

What runs is what is judged: isolated is a pass of the real `forward` in which the golden takes the place of every
stage as soon as it was recorded, so that cache, residual sums and wiring are in it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from llorch.cache import KVCache
from llorch.compare import EXACT, FLOAT32_ULP, FLOOR, Difference, Tolerance, measure, tolerance_from
from llorch.evidence import SAMPLINGS, Evidence, Tolerances, Truth, sampler_inputs
from llorch.forward import forward
from llorch.generate import sample_ids
from llorch.ops.precision import own_dtype_only
from llorch.replay import Pass, cut
from llorch.sampling import SamplingSettings, probabilities
from llorch.stages import BY_NAME, Stage, input_key, keys, matrix_of
from llorch.sums import MATMUL_ERROR, WIDE, product_limit
from llorch.truth import ATTENTION, WITNESS, distance
from llorch.weights import Weights

PASS, FAIL, TIE = "PASS", "FAIL", "TIE"
BACKENDS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "numpy": nullcontext,  # as it runs: small sums in float64
    "numpy-float32": own_dtype_only,  # every sum in float32, which is how larger models run
}
FLOAT64 = "numpy-float64"  # the same code in float64, judged by the truth alone
MATHEMATICS = Tolerance(1e-12, 1e-11)  # of ours in float64 from the truth: 4500 times what one rounding costs
COPIES = ("embed", "k_cache", "v_cache")  # isolated they are exact: nothing is computed
WORST = 4  # times the error of a whole tensor: what its worst element may be off, where limits are derived
DECODED = ("k_cache", "v_cache", "logits")  # what checkpoint 03 looks at after a split pass


@dataclass(frozen=True)
class Row:
    """One comparison and its verdict."""

    model: str
    checkpoint: str
    stage: str
    layer: int | None
    case: str
    producer: str
    backend: str
    mode: str  # isolated, chained, decode, exact, or free: with no flip replaced
    error: float  # ours from the golden
    worst: float  # its worst element
    truth_error: float  # ours from the float64 truth; NaN for isolated rows, which start from the golden
    producer_error: float  # the golden from the float64 truth
    tolerance: float
    tolerance_worst: float
    verdict: str
    note: str = ""
    flips: int = 0  # values of this stage that the next product rounds to another side than the golden's


@dataclass(frozen=True)
class Distance:
    """How far one golden is from the truth."""

    producer: str
    case: str
    mode: str
    stage: str
    layer: int | None
    difference: Difference


def ceiling(mode: str, last_position: int) -> Tolerance:
    """The largest tolerance that is ever granted.

    Args:
        mode: `isolated` or `chained`.
        last_position: The highest position of the pass; a float32 angle is off by up to position * 2^-24.

    Returns:
        The ceiling: rounding of one op, or of all before it, plus what float32 angles cost.
    """
    rounding = 1e-5 if mode == "isolated" else 1e-3
    angle = angle_error(last_position)
    return Tolerance(rounding + angle, 10 * (rounding + angle))


def angle_error(last_position: int) -> float:
    """What float32 angles up to a position may cost, in every dtype of a run."""
    return 8 * last_position * FLOAT32_ULP


def exact_row(
    model: str, checkpoint: str, stage: str, producer: str, wrong: float, note: str, *, backend: str = "numpy"
) -> Row:
    """The row of things that are equal or not; `wrong` is the share that is not."""
    return Row(
        model=model,
        checkpoint=checkpoint,
        stage=stage,
        layer=None,
        case="near",
        producer=producer,
        backend=backend,
        mode="exact",
        error=wrong,
        worst=wrong,
        truth_error=wrong,
        producer_error=0.0,
        tolerance=0.0,
        tolerance_worst=0.0,
        verdict=FAIL if wrong else PASS,
        note=note,
    )


def edge_of_a_filter(ours: np.ndarray, golden: np.ndarray, allowed: Tolerance) -> str:
    """Say whether two distributions differ only in tokens at the very edge of top-p.

    A float32 running sum over the vocabulary may be off by vocab * 2^-24, so that two engines draw the edge
    of top-p some tokens apart. What both keep must agree all the same.

    Args:
        ours: Our distribution.
        golden: The producer's.
        allowed: Tolerance for the tokens that both keep.

    Returns:
        A sentence for the row, empty when the difference is more than that.
    """
    both = (ours > 0) & (golden > 0)
    one = (ours > 0) != (golden > 0)
    mass = float(np.where(one, ours + golden, 0).sum(dtype=np.float64))
    if not one.any() or not both.any() or mass > ours.size * 2.0**-24:
        return ""
    shares = [np.where(both, p, 0) / p[both].sum(dtype=np.float64) for p in (ours, golden)]
    if not measure(shares[0], shares[1]).within(allowed):
        return ""
    return f"{int(one.sum())} tokens at the edge of a filter, {mass:.1e} of the probability"


def run(
    weights: Weights, this: Pass, *, n_cached: int = 0, golden: Mapping[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Trace of our forward pass; with `n_cached` the trace of the second of two passes.

    Args:
        weights: The model in the dtype to run.
        this: The tokens.
        n_cached: Tokens that a first pass puts into the cache.
        golden: Takes the place of each stage as soon as that was recorded, so that every stage is isolated.

    Returns:
        Stage key to array.
    """
    cache = KVCache(weights.config, weights.cache_dtype, first_position=this.first_position)
    ids = np.asarray(this.ids)
    trace: dict[str, np.ndarray] = {}

    def keep(name: str, array: np.ndarray) -> np.ndarray:
        trace[name] = array
        theirs = golden.get(name) if golden is not None else None
        return array if theirs is None or theirs.shape != array.shape else theirs.astype(array.dtype)

    if n_cached:
        forward(ids[:n_cached], weights, cache)
    forward(ids[n_cached:], weights, cache, keep=keep)
    return trace


class Verifier:
    """Judges our forward pass on one model against goldens or live evidence."""

    def __init__(
        self,
        name: str,
        weights: Weights,
        cases: Mapping[str, Pass],
        evidence: Mapping[str, Evidence],
        truth: Truth | None,
    ) -> None:
        """Prepare; nothing is computed yet.

        Args:
            name: Name of the model in the rows.
            weights: The model in float32.
            cases: The inputs.
            evidence: What each producer showed for them.
            truth: What float64 shows for them; None where no engine has it: limits are then the ceilings.

        Raises:
            ValueError: A trace has not exactly the stages of the model.
        """
        self.name = name
        self.backend = "numpy"
        self.weights = weights
        self.wide = weights.astype(np.float64)
        self.foreign = truth
        self.cases = cases
        self.evidence = evidence
        self._isolated_traces: dict[tuple[str, str], Mapping[str, np.ndarray]] = {}  # by case and producer
        self._keys = self._stages()
        for producer, shown in evidence.items():
            for case in cases:
                self._require_all_stages(producer, case, shown.traces[case])

    def _stages(self) -> list[tuple[str, Stage, int | None]]:
        """Trace key, stage and layer of everything that is judged."""
        return list(keys(self.weights.config))

    @cached_property
    def truth(self) -> Mapping[str, Mapping[str, np.ndarray]]:
        """The float64 trace of every case, of an engine that someone else wrote."""
        return self.foreign.evidence.traces if self.foreign is not None else {case: {} for case in self.cases}

    def on(self, backend: str) -> "Verifier":
        """The same verifier for one of `BACKENDS`, or for `FLOAT64`."""
        other = copy(self)
        other.backend, other._isolated_traces = backend, {}
        if backend == FLOAT64:
            other.weights = self.wide
            other.evidence = {WITNESS: self.foreign.evidence} if self.foreign is not None else {}
        return other

    def distances(self) -> Iterator[Distance]:
        """How far every golden is from the truth, isolated and chained."""
        for case, mode, key, stage, layer, producer in self._comparisons():
            yield Distance(producer, case, mode, stage.name, layer, self._distance(producer, case, mode, key))
        for producer, shown in self.evidence.items():
            for case in self.cases:
                for layer in range(self.weights.config.n_layers):
                    found = self._distance(producer, case, "isolated", f"l{layer}.{ATTENTION}")
                    yield Distance(producer, case, "isolated", ATTENTION, layer, found)
            difference = _from_truth(shown.selected_logits, self._true_row())
            yield Distance(producer, "near", "chained", "selected_logits", None, difference)
            for sampling, golden in shown.probabilities.items():
                difference = _from_truth(golden, self._true_probabilities(sampling))
                yield Distance(producer, "near", "isolated", "probabilities", None, difference)

    def _distance(self, producer: str, case: str, mode: str, key: str) -> Difference:
        if self.foreign is None:
            return Difference(math.inf, math.inf, "no truth")
        if mode == "isolated":
            return self.foreign.isolated[producer][case][key]
        return distance(self.evidence[producer].traces[case][key], self.truth[case][key], key)

    def tolerances(self) -> Tolerances:
        """Tolerances made from the producers' distances from the truth."""
        grouped: dict[tuple[str, str, str], list[Difference]] = defaultdict(list)
        for d in self.distances():
            grouped[d.case, d.mode, d.stage].append(d.difference)
        out: Tolerances = {}
        for (case, mode, stage), differences in grouped.items():
            clean = [d for d in differences if d.fault is None]
            made = tolerance_from(clean, floor=self._floor(stage)) if clean else Tolerance(math.inf, math.inf)
            out.setdefault(case, {}).setdefault(mode, {})[stage] = self._capped(made, case, mode, stage)
        return out

    def rows(self, tolerances: Tolerances) -> list[Row]:
        """Judge everything, in the arithmetic of the backend.

        Args:
            tolerances: Stored ones, or those made by `tolerances`.

        Returns:
            One row per comparison, in the order of the forward pass for each mode.
        """
        tolerances = {
            case: {
                mode: {stage: self._allowed(made, case, mode, stage) for stage, made in stages.items()}
                for mode, stages in modes.items()
            }
            for case, modes in tolerances.items()
        }
        with BACKENDS.get(self.backend, nullcontext)():
            return [*self.stage_rows(tolerances), *self.decode_rows(tolerances), *self.sampler_rows(tolerances)]

    def stage_rows(self, tolerances: Tolerances) -> Iterator[Row]:
        """Checkpoints 00 to 08: every stage and layer, isolated and chained."""
        chained = {name: self._run(self.weights, name) for name in self.cases}
        for case, mode, key, stage, layer, producer in self._comparisons():
            golden, true = self.evidence[producer].traces[case][key], self.truth[case].get(key)
            allowed = tolerances[case][mode][stage.name]
            place = stage.checkpoint, stage.name, layer, case, producer, mode
            if mode == "chained":
                yield self._row(*place, (chained[case][key], golden, true), allowed)
            else:
                row = self._row(*place, (self._isolated(case, producer)[key], golden, None), allowed)
                yield replace(row, producer_error=self._isolated_error(producer, case, key))

    def decode_rows(self, tolerances: Tolerances) -> Iterator[Row]:
        """Checkpoint 03: a pass in two parts gives what the producers' single pass gave."""
        for case, whole in self.cases.items():
            for n_cached in sorted({1, len(whole.ids) // 2, len(whole.ids) - 1} - {0, len(whole.ids)}):
                trace = self._run(self.weights, case, n_cached=n_cached)
                where = f"{case}, {n_cached} cached"
                for key, stage, layer in self._keys:
                    if stage.name not in DECODED:
                        continue
                    true = self.truth[case].get(key)
                    truth = cut(stage, true, n_cached) if true is not None else None
                    allowed = self._allowed_after_cached(tolerances, case, stage.name, len(whole.ids) - n_cached)
                    for producer, evidence in self.evidence.items():
                        arrays = trace[key], cut(stage, evidence.traces[case][key], n_cached), truth
                        yield self._row("03", stage.name, layer, where, producer, "decode", arrays, allowed)

    def sampler_rows(self, tolerances: Tolerances) -> Iterator[Row]:
        """Checkpoints 09 to 12: the row that sampling sees, its argmax, distributions, greedy text."""
        row = self._last_row()
        best = np.asarray([int(np.argmax(row))])
        greedy, seen = self._greedy(max(len(e.greedy) for e in self.evidence.values()))
        for producer, evidence in self.evidence.items():
            golden = evidence.selected_logits
            allowed = tolerances["near"]["chained"]["selected_logits"]
            arrays = row, golden, self._true_row()
            yield self._row("09", "selected_logits", None, "near", producer, "chained", arrays, allowed)
            yield self._exact("10", "argmax", producer, best, np.asarray([int(np.argmax(golden))]), [row])
            allowed = tolerances["near"]["isolated"]["probabilities"]
            for name, ours in self._probabilities().items():
                arrays = ours, evidence.probabilities[name], self._true_probabilities(name)
                judged = self._row("11", f"probabilities.{name}", None, "near", producer, "isolated", arrays, allowed)
                note = edge_of_a_filter(arrays[0], arrays[1], allowed) if judged.verdict == FAIL else ""
                yield replace(judged, verdict=TIE, note=note) if note else judged
            yield self._exact("12", "generation", producer, greedy, evidence.greedy, seen)

    def _last_row(self) -> np.ndarray:
        """Our logits of the last token of `near`, the row that sampling sees."""
        cache = KVCache(self.weights.config, self.weights.cache_dtype)
        return forward(np.asarray(self.cases["near"].ids), self.weights, cache, last_only=True)[0]

    def _run(self, weights: Weights, case: str, *, n_cached: int = 0) -> dict[str, np.ndarray]:
        """Our forward pass on a case."""
        return run(weights, self.cases[case], n_cached=n_cached)

    def _allowed_after_cached(self, tolerances: Tolerances, case: str, stage: str, n_tokens: int) -> Tolerance:
        """How far the last `n_tokens` of a pass may be off, when those before them were cached."""
        return tolerances[case]["chained"][stage]

    def ceiling_of(self, case: str, mode: str, stage: str) -> Tolerance:
        """The largest tolerance that is ever granted to a stage."""
        return ceiling(mode, int(self.cases[case].positions[-1]))

    def _floor(self, stage: str) -> float:
        """The smallest tolerance of a stage."""
        return FLOOR

    def _allowed(self, made: Tolerance, case: str, mode: str, stage: str) -> Tolerance:
        """What a row is granted: engines that happen to be near the truth must not make a right sum fail."""
        if mode == "isolated" and stage in COPIES:
            return EXACT
        if WITNESS in self.evidence:
            return MATHEMATICS
        capped = self._capped(made, case, mode, stage)
        if len(self.evidence) == 1 or stage not in (*BY_NAME, "selected_logits"):
            return capped  # with one engine the derived limit is in it
        error = self._derived(case, mode, stage, capped.error)
        highest = self.ceiling_of(case, mode, stage)
        return capped.at_least(Tolerance(error, WORST * error).at_most(highest))

    def _capped(self, made: Tolerance, case: str, mode: str, stage: str) -> Tolerance:
        capped = made.at_most(self.ceiling_of(case, mode, stage))
        if len(self.evidence) > 1 or stage not in (*BY_NAME, "selected_logits"):
            return capped
        error = self._derived(case, mode, stage, capped.error)
        own = mode == "isolated" and BY_NAME[stage].matrix  # its limit is the derived one, whatever the engine's error
        return Tolerance(error if own else max(capped.error, error), max(0 if own else capped.worst, WORST * error))

    def _derived(self, case: str, mode: str, stage: str, engines: float) -> float:
        """One engine, or two lucky ones, cannot say how far float32 sums may lie apart: limits of products are derived.

        Below a width of `WIDE` they are held to `MATMUL_ERROR`, or to 4 times the distance of the engine from the truth
        (`engines`) where its own sums cancel more than that; never beyond what is derived.

        Chained, the independent errors of all products in a row add up, as the square root of their number, and what
        lies between the products inherits them. With Q8_K they are felt most: its scale is a float32 that comes from
        one value by two divisions, so that the last bit of that value moves a whole block by a few.
        """
        if stage == "embed" or (mode == "isolated" and not BY_NAME[stage].matrix):
            return FLOOR
        if mode == "isolated":
            return self._granted(case, BY_NAME[stage], engines)
        in_a_row = 4 * self.weights.config.n_layers + 1  # qkv, attn_out, gate and up, ffn_out; logits
        return math.sqrt(in_a_row) * max(self._granted(case, product, 0.0) for product in self._products)

    def _granted(self, case: str, product: Stage, engines: float) -> float:
        limit, name = self._product_limits[case, product.name], matrix_of(product, self.weights.config)
        width = self.weights.shape(f"layers.0.{name}" if product.in_layer else name)[1]
        return limit if width >= WIDE else min(limit, max(MATMUL_ERROR, engines))

    @property
    def _products(self) -> list[Stage]:
        return list({stage.name: stage for _, stage, _ in self._keys if stage.matrix}.values())

    @cached_property
    def _product_limits(self) -> Mapping[tuple[str, str], float]:
        """Case and stage to the limit of a product with a matrix, the largest of all layers; of one engine's terms."""
        evidence = next(iter(self.evidence.values()))
        config = self.weights.config
        limits: dict[tuple[str, str], float] = defaultdict(float)
        for case in self.cases:
            trace = evidence.traces[case]
            for trace_key, stage, layer in self._keys:
                if stage.matrix:
                    weights = self.weights if layer is None else self.weights.layer(layer)
                    x, matrix = trace[input_key(stage.inputs[0], layer, config)], weights[matrix_of(stage, config)]
                    with np.errstate(all="ignore"):  # a golden that is not finite fails as such
                        limit = product_limit(x, matrix, trace[trace_key])
                    limits[case, stage.name] = max(limits[case, stage.name], limit)
        return limits

    def _require_all_stages(self, producer: str, case: str, trace: Mapping[str, np.ndarray]) -> None:
        wrong = sorted(trace.keys() ^ {key for key, _, _ in self._keys})
        if wrong:
            raise ValueError(
                f"{self.name}: the {case} trace of {producer} must have the {len(self._keys)} stages of the model; "
                f"missing or unknown: {', '.join(wrong[:5])}; run reference_outputs/regenerate.py"
            )

    def _comparisons(self) -> Iterator[tuple[str, str, str, Stage, int | None, str]]:
        for case in self.cases:
            for mode in ("isolated", "chained"):
                for key, stage, layer in self._keys:
                    for producer in self.evidence:
                        yield case, mode, key, stage, layer, producer

    def _isolated(self, case: str, producer: str) -> Mapping[str, np.ndarray]:
        """Every stage of ours, made of the golden's inputs."""
        if (case, producer) not in self._isolated_traces:
            with np.errstate(all="ignore"):  # a golden that is not finite fails as such
                self._isolated_traces[case, producer] = self._run_isolated(case, self.evidence[producer].traces[case])
        return self._isolated_traces[case, producer]

    def _run_isolated(self, case: str, golden: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return run(self.weights, self.cases[case], golden=golden)

    def _isolated_error(self, producer: str, case: str, key: str) -> float:
        """How far a golden is from what float64 makes of its own inputs; unknown without the truth."""
        if self.foreign is None or producer == WITNESS:
            return math.nan if self.foreign is None else 0.0
        return self.foreign.isolated[producer][case][key].error

    def _true_row(self) -> np.ndarray | None:
        return self.foreign.evidence.selected_logits if self.foreign is not None else None

    def _true_probabilities(self, name: str) -> np.ndarray | None:
        return self.foreign.evidence.probabilities[name] if self.foreign is not None else None

    def _probabilities(self) -> dict[str, np.ndarray]:
        """Our distribution for each of `SAMPLINGS`."""
        logits, history = sampler_inputs(self.cases["near"].ids, self.weights.config.vocab_size)
        return {name: probabilities(logits.astype(self.weights.dtype), s, history) for name, s in SAMPLINGS.items()}

    def _greedy(self, n_tokens: int) -> tuple[np.ndarray, list[np.ndarray]]:
        cache = KVCache(self.weights.config, self.weights.cache_dtype)
        seen: list[np.ndarray] = []  # the logits of every step

        def step(new: Sequence[int]) -> np.ndarray:
            seen.append(forward(np.asarray(new), self.weights, cache, last_only=True)[0])
            return seen[-1]

        sampled = sample_ids(step, self.cases["near"].ids, SamplingSettings(), max_tokens=n_tokens)
        return np.asarray([token for token, _ in sampled], np.int64), seen

    def _row(
        self,
        checkpoint: str,
        stage: str,
        layer: int | None,
        case: str,
        producer: str,
        mode: str,
        arrays: tuple[np.ndarray, np.ndarray, np.ndarray | None],
        allowed: Tolerance,
    ) -> Row:
        ours, golden, truth = arrays
        masked = stage == "attn_scores"
        difference = measure(ours, golden, masked=masked)
        return Row(
            model=self.name,
            checkpoint=checkpoint,
            stage=stage,
            layer=layer,
            case=case,
            producer=producer,
            backend=self.backend,
            mode=mode,
            error=difference.error,
            worst=difference.worst,
            truth_error=_from_truth(ours, truth, masked=masked).error,
            producer_error=_from_truth(golden, truth, masked=masked).error,
            tolerance=allowed.error,
            tolerance_worst=allowed.worst,
            verdict=PASS if difference.within(allowed) else FAIL,
            note=difference.fault or "",
        )

    def _exact(
        self,
        checkpoint: str,
        stage: str,
        producer: str,
        got: np.ndarray,
        want: np.ndarray,
        seen: Sequence[np.ndarray],
    ) -> Row:
        difference = measure(got, want)
        fault = difference.fault or ""
        row = exact_row(self.name, checkpoint, stage, producer, difference.error, fault, backend=self.backend)
        if row.verdict == PASS or difference.fault is not None:
            return row
        at = int(np.argmax(got != want))
        gap = _gap(seen[at], int(got[at]), int(want[at]))
        note = f"token {at}: got {got[at]}, want {want[at]}, logit gap {gap:.1e} of the largest logit"
        return replace(row, verdict=TIE if gap <= ceiling("isolated", 0).error else FAIL, note=note)


def _gap(logits: np.ndarray, got: int, want: int) -> float:
    """How far apart the logits of two tokens are, as a share of the largest; infinite for an id that is none."""
    if not 0 <= want < logits.size:
        return float("inf")
    return abs(float(logits[got]) - float(logits[want])) / float(np.abs(logits).max())


def _from_truth(array: np.ndarray, truth: np.ndarray | None, *, masked: bool = False) -> Difference:
    if truth is None:
        return Difference(math.nan, math.nan, "no truth")
    return measure(array.astype(truth.dtype), truth, masked=masked)
