"""Verification of one model: every checkpoint, every stage and layer, against each producer and the float64 truth.

Two questions are kept apart. *Mathematics*: ours in float64 is compared with the truth, which transformers computes
(`truth`), at 1e-12; a constant that is wrong by a millionth shows. *Arithmetic*: ours in float32 is compared
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
from itertools import zip_longest

import numpy as np

from llorch.cache import KVCache
from llorch.files import Weights
from llorch.forward import forward
from llorch.generate import sample_ids
from llorch.ops.precision import own_dtype_only
from llorch.sampling import SamplingSettings, probabilities
from llorch.stages import BY_NAME, Stage, input_key, keys, matrix_of
from llorch.verify.compare import EXACT, FLOAT32_ULP, FLOOR, Difference, Tolerance, measure, tolerance_from
from llorch.verify.goldens import SAMPLINGS, Evidence, Tolerances, Truth, sampler_inputs
from llorch.verify.judge import FAIL, PASS, TIE, Row
from llorch.verify.replay import Pass, cut
from llorch.verify.sums import MATMUL_ERROR, WIDE, product_limit
from llorch.verify.truth import ATTENTION, WITNESS, distance

BACKENDS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "numpy": nullcontext,  # as it runs: small sums in float64
    "numpy-float32": own_dtype_only,  # every sum in float32, which is how larger models run
}
FLOAT64 = "numpy-float64"  # the same code in float64, judged by the truth alone
MATHEMATICS = Tolerance(1e-12, 1e-11)  # of ours in float64 from the truth: 4500 times what one rounding costs
COPIES = ("embed", "k_cache", "v_cache")  # isolated they are exact: nothing is computed
WORST = 4  # times the error of a whole tensor: what its worst element may be off, where limits are derived


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


def edge_of_top_p(
    ours: np.ndarray, golden: np.ndarray, logits: np.ndarray, settings: SamplingSettings, allowed: Tolerance
) -> str:
    """Say whether a golden differs from us in nothing but tokens that its running sum put on the other side of top-p.

    Engines sum up float32 probabilities; the n partial sums of such a sum, and of the one that normalises, are each
    rounded by up to 2^-24: by 2^-24 * sqrt(2n / 3) on the average, of which 4 times are granted. Ours sums in float64,
    so that it must have the very tokens of the true sum. No other filter has an edge that rounding moves so far.

    Args:
        ours: Our distribution.
        golden: The producer's.
        logits: What both were made from.
        settings: What was done with them.
        allowed: Tolerance for the tokens that both keep.

    Returns:
        A sentence for the row, empty when the difference is more than that.
    """
    both, one = (ours > 0) & (golden > 0), (ours > 0) != (golden > 0)
    only_top_p = SamplingSettings(temperature=settings.temperature, top_p=settings.top_p)
    if golden.dtype != np.float32 or settings != only_top_p or not one.any() or not both.any():
        return ""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / settings.temperature)
    order = np.argsort(-logits, kind="stable")
    ahead = np.empty_like(weights)
    ahead[order] = np.cumsum(weights[order]) - weights[order]
    off = ahead / weights.sum() - settings.top_p  # a token stays while the mass of those ahead of it is below p
    moved = 4 * 2.0**-24 * math.sqrt(2 * logits.size / 3)
    if np.any(one & ((np.abs(off) > moved) | ((ours > 0) != (off < 0)))):
        return ""
    shares = [np.where(both, p, 0) / p[both].sum(dtype=np.float64) for p in (ours, golden)]
    if not measure(shares[0], shares[1]).within(allowed):
        return ""
    return (
        f"{int(one.sum())} tokens at the edge of top-p, {np.abs(off[one]).max():.1e} from p; rounding moves {moved:.1e}"
    )


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

    @property
    def _shown(self) -> Sequence[tuple[str, Stage, int | None]]:
        """What of that our pass shows."""
        return self._keys

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
        """Checkpoint 03: a pass in two parts gives at every stage what the producers' single pass gave."""
        for case, whole in self.cases.items():
            for n_cached in sorted({1, len(whole.ids) // 2, len(whole.ids) - 1} - {0, len(whole.ids)}):
                trace = self._run(self.weights, case, n_cached=n_cached)
                where = f"{case}, {n_cached} cached"
                for key, stage, layer in self._shown:
                    true = self.truth[case].get(key)
                    truth = cut(stage, true, n_cached) if true is not None else None
                    for producer, evidence in self.evidence.items():
                        golden = evidence.traces[case][key]
                        part = cut(stage, golden, n_cached)
                        allowed = on_scale_of(part, golden, tolerances[case]["chained"][stage.name])
                        allowed = allowed.at_most(self.ceiling_of(case, "chained", stage.name))
                        arrays = trace[key], part, truth
                        yield self._row("03", stage.name, layer, where, producer, "decode", arrays, allowed)

    def sampler_rows(self, tolerances: Tolerances) -> Iterator[Row]:
        """Checkpoints 09 to 12: the row that sampling sees, its argmax, distributions, greedy text."""
        row = self._last_row()
        best = np.asarray([int(np.argmax(row))])
        greedy = self._text((), max(len(e.greedy) for e in self.evidence.values()))
        for producer, evidence in self.evidence.items():
            golden = evidence.selected_logits
            allowed = tolerances["near"]["chained"]["selected_logits"]
            arrays = row, golden, self._true_row()
            yield self._row("09", "selected_logits", None, "near", producer, "chained", arrays, allowed)
            yield self._tokens("10", "argmax", producer, best, np.asarray([int(np.argmax(golden))]))
            yield from self._probability_rows(producer, evidence, tolerances["near"]["isolated"]["probabilities"])
            yield self._tokens("12", "generation", producer, greedy, evidence.greedy)

    def _probability_rows(self, producer: str, evidence: Evidence, allowed: Tolerance) -> Iterator[Row]:
        """Checkpoint 11: what each setting makes of the same logits."""
        logits, _ = sampler_inputs(self.cases["near"].ids, self.weights.config.vocab_size)
        for name, ours in self._probabilities().items():
            golden = evidence.probabilities[name]
            arrays = ours, golden, self._true_probabilities(name)
            row = self._row("11", f"probabilities.{name}", None, "near", producer, "isolated", arrays, allowed)
            edge = edge_of_top_p(ours, golden, logits, SAMPLINGS[name], allowed) if row.verdict == FAIL else ""
            yield replace(row, verdict=TIE, note=edge) if edge else row

    def _last_row(self) -> np.ndarray:
        """Our logits of the last token of `near`, the row that sampling sees."""
        cache = KVCache(self.weights.config, self.weights.cache_dtype)
        return forward(np.asarray(self.cases["near"].ids), self.weights, cache, last_only=True)[0]

    def _run(self, weights: Weights, case: str, *, n_cached: int = 0) -> dict[str, np.ndarray]:
        """Our forward pass on a case."""
        return run(weights, self.cases[case], n_cached=n_cached)

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
                for key, stage, layer in self._shown:
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

    def _true_step(self, text: np.ndarray, at: int) -> np.ndarray | None:
        """The truth's logits of one token of a text that follows `near`; None behind another text than its own."""
        if self.foreign is None or not np.array_equal(text[:at], self.foreign.evidence.greedy[:at]):
            return None
        return self.foreign.step_logits[at]

    def _text(self, after: Sequence[int], n_tokens: int) -> np.ndarray:
        """The greedy text of ours that follows `near` and some tokens more."""
        cache = KVCache(self.weights.config, self.weights.cache_dtype)

        def step(new: Sequence[int]) -> np.ndarray:
            return forward(np.asarray(new), self.weights, cache, last_only=True)[0]

        prompt = (*self.cases["near"].ids, *after)
        sampled = sample_ids(step, prompt, SamplingSettings(), max_tokens=n_tokens)
        return np.asarray([token for token, _ in sampled], np.int64)

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

    def _tokens(self, checkpoint: str, stage: str, producer: str, got: np.ndarray, want: np.ndarray) -> Row:
        """The row of greedy tokens, a TIE where they leave the golden's at near-ties of the truth alone."""
        difference = measure(got, want)
        fault = difference.fault or ""
        row = exact_row(self.name, checkpoint, stage, producer, difference.error, fault, backend=self.backend)
        if row.verdict == PASS or difference.fault is not None:
            return row
        notes: list[str] = []
        for at, token in self._departures(got, want):
            gap, moved = true_gap(self._true_step(want, at), token, int(want[at])), self._moved_by_rounding(at)
            notes.append(f"token {at}: got {token}, want {want[at]}, true gap {gap:.1e}, rounding moves {moved:.1e}")
            if gap > moved:
                return replace(row, note=notes[-1])
        return replace(row, verdict=TIE, note="; ".join(notes))

    def _departures(self, got: np.ndarray, want: np.ndarray) -> Iterator[tuple[int, int]]:
        """Where our text leaves the golden's, and our token; it is then begun anew behind the golden's token."""
        at = 0
        while at < len(want):
            pairs = enumerate(zip_longest(got.tolist(), want[at:].tolist(), fillvalue=-1))
            apart = next(((n, ours) for n, (ours, theirs) in pairs if ours != theirs), None)
            if apart is None:
                return
            yield at + apart[0], apart[1]
            at += apart[0] + 1
            got = self._text(want[:at].tolist(), len(want) - at)

    def _moved_by_rounding(self, n_after: int) -> float:
        """How far apart two true logits may be that rounding swaps, in root mean squares of their row.

        The error of one product of an engine in two logits is what two engines' products may differ by (see `sums`);
        the independent errors of all products in a row add up as the square root of their number. Engines make angles
        in float32, which are off by up to position * 2^-24.
        """
        in_a_row = 4 * self.weights.config.n_layers + 1  # qkv, attn_out, gate and up, ffn_out; logits
        if WITNESS in self.evidence:
            return MATHEMATICS.worst
        product = max(limit for (case, _), limit in self._product_limits.items() if case == "near")
        return math.sqrt(in_a_row) * product + (len(self.cases["near"].ids) + n_after) * 2.0**-24


def on_scale_of(part: np.ndarray, whole: np.ndarray, allowed: Tolerance) -> Tolerance:
    """What a part of an array is granted: as much as the whole is, told on the part's own scale.

    Args:
        part: Some rows of it.
        whole: The array that a tolerance was made for.
        allowed: The tolerance.

    Returns:
        It, times the scale of the whole over that of the part, for the error and for the worst element.
    """
    if part.size == whole.size:
        return allowed
    (error, worst), (of_part, of_worst) = _scales(whole), _scales(part)
    by_error, by_worst = error / of_part if of_part else 1.0, worst / of_worst if of_worst else 1.0
    return Tolerance(allowed.error * by_error, allowed.worst * by_worst)


def _scales(array: np.ndarray) -> tuple[float, float]:
    """Root mean square and largest size of what is not masked."""
    sizes = np.abs(array if np.isfinite(array).all() else np.where(np.isfinite(array), array, 0))
    return float(np.sqrt(np.square(sizes, dtype=np.float64).mean())), float(sizes.max())


def true_gap(logits: np.ndarray | None, *tokens: int) -> float:
    """How far below the truly best token the least likely of some tokens lies.

    Args:
        logits: Of the truth, None where it has none.
        tokens: Those that two sides found most likely.

    Returns:
        The distance in root mean squares of the logits; infinite when a token is none, or nothing is known.
    """
    if logits is None or not all(0 <= token < logits.size for token in tokens):
        return math.inf
    gap = float(logits.max() - logits[list(tokens)].min())
    return gap / float(np.sqrt(np.square(logits).mean())) if gap else 0.0


def _from_truth(array: np.ndarray, truth: np.ndarray | None, *, masked: bool = False) -> Difference:
    if truth is None:
        return Difference(math.nan, math.nan, "no truth")
    return measure(array.astype(truth.dtype), truth, masked=masked)
