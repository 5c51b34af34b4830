"""Checkpoints 00 to 12: every stage and layer of the forward pass, the cache, and what sampling makes of the logits.

There are two comparisons. *Mathematics*: llorch in float64 is compared with the float64 reference, which transformers
computes, at 1e-12; a constant that is wrong by a millionth shows. *Arithmetic*: llorch in another dtype is compared
with every golden, at the tolerances of `tolerances`. No tolerance is made of numbers that llorch computed.

Every stage is judged *isolated*, in a pass in which the golden takes the place of each stage as soon as it was
recorded, and *chained*, in llorch's own pass; *decode* rows are chained, behind a cache that another pass filled. With
exact numerics NumPy begins a third pass between the two, of other tokens, and ends it in the middle: it leaves nothing.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any

import numpy as np

from llorch.engines import LoadPath
from llorch.files import Weights
from llorch.judging.expectations.tokens import GreedyJudge, edge_of_top_p
from llorch.judging.expert_selection import ExpertSelection, StageOverride, as_made
from llorch.judging.goldens.float64_reference import FLOAT64_REFERENCE
from llorch.judging.goldens.forward import SAMPLINGS, EngineOutput, ReferenceOutput, sampler_inputs
from llorch.judging.judge import Comparison, Expectation, as_tie, judge, with_load_paths
from llorch.judging.runners import Runner, StageObserver
from llorch.judging.runners.shared import SharedWeights
from llorch.judging.tolerances.forward import (
    MATHEMATICS,
    NOTHING_KNOWN,
    SCORES,
    ForwardTolerances,
    Margins,
    limit_of_softmax,
    widened,
)
from llorch.judging.tolerances.rounding import ARITHMETICS, CHAINED, FLOAT32, ISOLATED
from llorch.ops.sampling import greedy
from llorch.runtime.errors import UserError
from llorch.stages.comparison import EXACT, FAIL, Difference, Tolerance, distance, measure
from llorch.stages.stage_ref import Pass, StageRef, part_of, token_axis
from llorch.stages.table import ATTENTION, BY_NAME, Stage, input_keys, key, keys

COPIES = ("embed", "k_cache", "v_cache", "conv_state")  # isolated they are exact: nothing is computed


class ForwardSuite:
    """Expectations of the forward pass of one model."""

    def __init__(
        self,
        model: str,
        weights: Weights,
        cases: Mapping[str, Pass],
        engine_outputs: Mapping[str, EngineOutput],
        reference: ReferenceOutput | None,
        *,
        n_prompt: int | None = None,
    ) -> None:
        """Prepare; nothing is computed yet.

        Args:
            model: Its name in the rows.
            weights: The model in float32, with its numerics.
            cases: The inputs.
            engine_outputs: Outputs of each reference engine for them.
            reference: The float64 reference; None where no engine has it: tolerances are then only the derived ones.
            n_prompt: Tokens of `near` before the greedy text, where it holds that too.

        Raises:
            ValueError: A trace has not exactly the stages of the model.
        """
        self.model, self.weights, self.cases, self.engine_outputs, self.reference = (
            model,
            weights,
            cases,
            engine_outputs,
            reference,
        )
        self.prompt = cases["near"].ids[:n_prompt] if "near" in cases else ()
        self._keys = list(keys(weights.config))
        self._places = {name: (stage, layer) for name, stage, layer in self._keys}
        self._choices = [name for name, stage, _ in self._keys if stage.is_choice]
        self._limits: dict[tuple[str, str, bool], ForwardTolerances] = {}
        self._distances: dict[tuple[str, str, str], Difference] = {}
        self._errors: dict[tuple[str, str, int, str], float] = {}
        for engine, shown in engine_outputs.items():
            for case in cases:
                self._require_all_stages(engine, case, shown.traces[case])
        self._measure_engines()

    def comparisons(self, runner: Runner) -> list[Comparison]:
        """Judge everything that a runner computes, in the order of the forward pass for each mode."""
        sampled = [lambda: self._last_row(runner), lambda: runner.text(self.prompt, self.n_greedy(runner))]
        *passes, last, text = self._made(runner, [*self._stage_passes(runner), *self._decode_passes(runner), *sampled])
        with runner.arithmetic():
            rows = chain(chain.from_iterable(passes), self._sampler_rows(runner, last, text))
            return list(with_load_paths(rows, self.routes))

    @property
    def routes(self) -> Mapping[str, LoadPath]:
        """Load path of the file into each reference engine."""
        true = {FLOAT64_REFERENCE: self.reference.engine_output} if self.reference is not None else {}
        return {name: shown.load_path for name, shown in {**self.engine_outputs, **true}.items()}

    def stage_rows(self, runner: Runner) -> list[Comparison]:
        """Compare checkpoints 00 to 08: every stage, isolated and chained, and logits with no flip replaced."""
        return [*chain.from_iterable(self._made(runner, list(self._stage_passes(runner))))]

    def decode_rows(self, runner: Runner) -> list[Comparison]:
        """Compare a pass in two parts with the engines' single pass at every stage, for checkpoint 03."""
        return [*chain.from_iterable(self._made(runner, list(self._decode_passes(runner))))]

    def _made(self, runner: Runner, passes: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run the passes and return their results; those through a large model go through its layers together."""
        with runner.arithmetic():
            if isinstance(self.weights, SharedWeights):
                return self.weights.together(passes)
            return [one() for one in passes]

    def _stage_passes(self, runner: Runner) -> Iterator[Callable[[], list[Comparison]]]:
        for case, this in self.cases.items():
            for engine, golden in self.engines(runner).items():
                expectation = partial(self.isolated, runner, case, engine)
                yield partial(self._seen, runner, [expectation], partial(runner.isolated, this, golden.traces[case]))
            for engines in self._agreeing(runner, case):
                yield partial(self._chained_rows, runner, case, engines)

    def _decode_passes(self, runner: Runner) -> Iterator[Callable[[], list[Comparison]]]:
        for case, this in self.cases.items():
            for n_cached, engines in product(this.splits, self._agreeing(runner, case)):
                yield partial(self._chained_rows, runner, case, engines, n_cached)

    def _agreeing(self, runner: Runner, case: str) -> list[list[str]]:
        """Group the reference engines that chose the same experts.

        llorch runs once for each group, with the group's expert selection.
        """
        found: dict[bytes, list[str]] = {}
        for engine, golden in self.engines(runner).items():
            chosen = (golden.traces[case][name].tobytes() for name in self._choices)
            found.setdefault(b"".join(chosen), []).append(engine)
        return [*found.values()]

    def _chained_rows(self, runner: Runner, case: str, engines: Sequence[str], n_cached: int = 0) -> list[Comparison]:
        """Compare llorch's own pass with engines that chose the same experts."""
        expectations = [partial(self.chained, runner, case, engine, n_cached) for engine in engines]
        override = self._going_on(runner, case, engines[0])
        comparisons = self._seen(
            runner, expectations, partial(runner.chained, case, self.cases[case], n_cached=n_cached, override=override)
        )
        return (
            [*comparisons, self._free_row(runner, case, comparisons)] if self.rounds and not n_cached else comparisons
        )

    def _going_on(self, runner: Runner, case: str, engine: str) -> StageOverride:
        """Make a function that continues with a reference engine's expert selection where llorch's is as good."""

        def override(name: str, array: np.ndarray, start: int) -> np.ndarray:
            if name not in self._choices:
                return array
            return self._choice(runner, "chained", case, engine, name, start, start + len(array)).settled(array)

        return override if self._choices else as_made

    def _choice(
        self, runner: Runner, mode: str, case: str, engine: str, name: str, start: int = 0, stop: int | None = None
    ) -> ExpertSelection:
        """Return a reference engine's expert selection for the tokens from `start` on.

        A chained selection uses the logits of the float64 reference, if there is one. An isolated selection uses the
        logits of the reference engine.
        """
        golden, (stage, layer) = self.engines(runner)[engine].traces[case], self._places[name]
        best = self.reference.engine_output.traces[case] if self.reference is not None else golden
        if mode == "isolated":
            scores = golden[input_keys(stage, layer, self.weights.config)[0]]
            half = ARITHMETICS.get(runner.dtype, FLOAT32)
            variance = half.rounding(scores) if half.is_half else np.zeros_like(scores)
        elif runner.dtype == "float64":
            scores = best[key("router_logits", layer)]
            variance = np.full_like(scores, np.square(MATHEMATICS.worst * np.abs(scores).max()))
        else:
            scores = best[key("router_logits", layer)]
            variance = self._limits_for(runner, case).chained_variance(key("router_logits", layer))
        part = slice(start, stop)
        return ExpertSelection(golden[name][part], scores[part], variance[part])

    def _last_row(self, runner: Runner) -> Mapping[str, np.ndarray]:
        """Compute the row that sampling sees, for each reference engine with its expert selection."""
        this, agreeing = self.cases["near"], self._agreeing(runner, "near")
        rows = [(group, runner.last_row(this, self._going_on(runner, "near", group[0]))) for group in agreeing]
        return {engine: row for group, row in rows for engine in group}

    def _seen(
        self, runner: Runner, expectations: Sequence[Callable[..., Expectation]], run: Callable[[StageObserver], None]
    ) -> list[Comparison]:
        """Compare the stages of one pass, each as soon as it is there; a stage that never comes fails."""
        comparisons: dict[str, list[Comparison]] = {}

        def compare(name: str, array: np.ndarray | None) -> list[Comparison]:
            return [
                judge(expectation(name), array, model=self.model, backend=runner.name) for expectation in expectations
            ]

        def observe(name: str, array: np.ndarray, *, flips: int = 0, refused: int = 0) -> None:
            comparisons[name] = [_with_flips(c, flips, refused) for c in compare(name, array)]

        run(observe)
        shown = (name for name, stage, _ in self._keys if stage.name not in runner.hidden)
        return [c for name in shown for c in comparisons.get(name) or compare(name, None)]

    @property
    def rounds(self) -> bool:
        """True if values flip: under ggml numerics."""
        return self.weights.numerics.rounds_activations

    def engines(self, runner: Runner) -> Mapping[str, EngineOutput]:
        """Return the reference engines that a runner has to reproduce; in float64 only the float64 reference."""
        if runner.dtype != "float64":
            return self.engine_outputs
        return {FLOAT64_REFERENCE: self.reference.engine_output} if self.reference is not None else {}

    def isolated(self, runner: Runner, case: str, engine: str, name: str) -> Expectation:
        """Build the expectation of a stage that receives the inputs that the golden received."""
        stage, layer = self._places[name]
        choice = self._choice(runner, "isolated", case, engine, name) if stage.is_choice else None
        fused = runner.hidden >= SCORES and stage.name == "attn_context"
        return Expectation(
            StageRef(stage.checkpoint, stage.name, layer, case),
            "isolated",
            engine,
            self.engines(runner)[engine].traces[case][name],
            self._isolated_limit(runner, case, stage, name),
            engine_error=self._isolated_error(engine, case, key(ATTENTION, layer) if fused else name),
            masked=stage.masked,
            token_axis=token_axis(stage),
            expert_selection=choice,
        )

    def chained(self, runner: Runner, case: str, engine: str, n_cached: int, name: str) -> Expectation:
        """Build the expectation of a stage in llorch's own pass, or in the second part of that pass."""
        (stage, layer), stop = self._places[name], len(self.cases[case].ids)
        true = self.reference.engine_output.traces[case][name] if self.reference is not None else None
        expected = part_of(stage, self.engines(runner)[engine].traces[case][name], n_cached, stop)
        at = engine, case, n_cached, name
        expectation = Expectation(
            StageRef("03" if n_cached else stage.checkpoint, stage.name, layer, case, n_cached=n_cached),
            "decode" if n_cached else "chained",
            engine,
            expected,
            self._chained_limit(runner, case, engine, name, n_cached),
            reference=expected
            if engine == FLOAT64_REFERENCE
            else None
            if true is None
            else part_of(stage, true, n_cached, stop),
            engine_error=self._errors.get(at),
            masked=stage.masked,
            token_axis=token_axis(stage),
            expert_selection=self._choice(runner, "chained", case, engine, name, n_cached) if stage.is_choice else None,
        )
        if engine != FLOAT64_REFERENCE:
            self._errors[at] = expectation.engine_error_of_golden  # the same for every runner
        return expectation

    def _chained_limit(self, runner: Runner, case: str, engine: str, name: str, n_cached: int) -> Tolerance:
        if engine == FLOAT64_REFERENCE:
            return self.tolerances(case).in_float64(name, n_cached)
        return self._limits_for(runner, case).chained(name, n_cached)

    def tolerances(self, case: str, dtype: str = "float32", *, fused: bool = False) -> ForwardTolerances:
        """Return the tolerances of a case, for runs in a dtype; fused attention shows no scores."""
        if (case, dtype, fused) not in self._limits:
            golden = (
                self.reference.engine_output if self.reference is not None else next(iter(self.engine_outputs.values()))
            )
            self._limits[case, dtype, fused] = ForwardTolerances(
                self.weights,
                self.cases[case],
                golden.traces[case],
                ARITHMETICS[dtype],
                fused=fused,
                distance=lambda mode, stage: self._distance(case, mode, stage, fused=fused),
            )
        return self._limits[case, dtype, fused]

    def _distance(self, case: str, mode: str, stage: str, *, fused: bool) -> Difference | None:
        """Return the engines' largest distance from the float64 reference at a stage, None if unknown."""
        alone = fused and (mode, stage) == ("isolated", "attn_context")
        return self._distances.get((case, mode, ATTENTION if alone else stage))

    def _limits_for(self, runner: Runner, case: str) -> ForwardTolerances:
        return self.tolerances(case, runner.dtype, fused=runner.hidden >= SCORES)

    def sampler_rows(self, runner: Runner) -> Iterator[Comparison]:
        """Compare checkpoints 09 to 12: the row that sampling sees, its argmax, distributions, greedy text."""
        return self._sampler_rows(runner, self._last_row(runner), runner.text(self.prompt, self.n_greedy(runner)))

    def n_greedy(self, runner: Runner) -> int:
        """Count the tokens of the greedy text."""
        return max((len(golden.greedy) for golden in self.engines(runner).values()), default=0)

    def _sampler_rows(self, runner: Runner, last: Mapping[str, np.ndarray], text: np.ndarray) -> Iterator[Comparison]:
        """Compare checkpoints 09 to 12.

        `last` has llorch's last row of logits for each reference engine, `text` the token ids of its greedy text.
        """
        distributions = runner.probabilities(*self.sampler_inputs())
        tokens = self.tokens(runner)
        first = (
            GreedyJudge(self.model, runner, self.prompt, NOTHING_KNOWN) if self.rounds else tokens
        )  # `_beside_one_pass`
        for engine, golden in self.engines(runner).items():
            row, best = last[engine], np.asarray([greedy(last[engine])])
            selected = judge(self.selected(runner, engine), row, model=self.model, backend=runner.name)
            argmax = first.comparison(
                "10", "argmax", engine, best, np.asarray([int(np.argmax(golden.selected_logits))])
            )
            yield from (self._beside_one_pass(runner, each, row, golden) for each in (selected, argmax))
            for name in golden.probabilities:
                yield self.distribution_row(runner, self.distribution(runner, engine, name), distributions[name])
            yield tokens.comparison("12", "generation", engine, text, golden.greedy)

    def tokens(self, runner: Runner) -> GreedyJudge:
        """Make the judge of tokens at checkpoints 10 and 12, where rounding decides near-ties."""
        return GreedyJudge(self.model, runner, self.prompt, self._margins(runner))

    def selected(self, runner: Runner, engine: str) -> Expectation:
        """Checkpoint 09: the row that sampling sees."""
        tolerance = MATHEMATICS if engine == FLOAT64_REFERENCE else self._limits_for(runner, "near").last_row()
        true = self.reference.engine_output.selected_logits if self.reference is not None else None
        expected = self.engines(runner)[engine].selected_logits
        return Expectation(StageRef("09", "selected_logits"), "chained", engine, expected, tolerance, reference=true)

    def distribution(self, runner: Runner, engine: str, name: str) -> Expectation:
        """Checkpoint 11: what one of `SAMPLINGS` makes of `sampler_inputs`."""
        true = self.reference.engine_output.probabilities[name] if self.reference is not None else None
        expected = self.engines(runner)[engine].probabilities[name]
        allowed = MATHEMATICS if runner.dtype == "float64" else self.softmax_limit()
        return Expectation(
            StageRef("11", "probabilities", part=name), "isolated", engine, expected, allowed, reference=true
        )

    def distribution_row(self, runner: Runner, expectation: Expectation, ours: np.ndarray) -> Comparison:
        """Compare a distribution with its expectation: a TIE if only tokens at the edge of top-p differ."""
        comparison = judge(expectation, ours, model=self.model, backend=runner.name)
        if comparison.verdict != FAIL:
            return comparison
        settings, (logits, _) = SAMPLINGS[expectation.stage_ref.part or ""], self.sampler_inputs()
        edge = edge_of_top_p(ours, expectation.expected, logits, settings, expectation.tolerance)
        return as_tie(comparison, edge) if edge else comparison

    def _free_row(self, runner: Runner, case: str, chained: Sequence[Comparison]) -> Comparison:
        """Judge the run as users get it, with nothing replaced; the tolerance covers the effect of flips only."""
        engine, golden = next(iter(self.engine_outputs.items()))
        expectation = Expectation(
            StageRef("08", "logits", None, case), "free", engine, golden.traces[case]["logits"],
            self._limits_for(runner, case).free(), token_axis=0,
        )  # fmt: skip
        comparison = judge(expectation, runner.free(self.cases[case]), model=self.model, backend=runner.name)  # type: ignore[attr-defined]
        n_flips = sum(each.flips for each in chained)
        said = f"{n_flips} values flip; without replacing them, the error is {comparison.difference.error:.1e}"
        return replace(comparison, note=comparison.note or said)

    def _beside_one_pass(
        self, runner: Runner, comparison: Comparison, ours: np.ndarray, golden: EngineOutput
    ) -> Comparison:
        """Mark a failing row as a tie if flips explain it: llorch equals llama.cpp's result for all rows in one batch.

        With one row of logits llama.cpp adds in another order than with many rows. The two results may differ by the
        effect of flips.
        """
        if comparison.verdict != FAIL or not self.rounds:
            return comparison
        tolerances, single = self._limits_for(runner, "near"), golden.traces["near"]["logits"][-1]
        equal = measure(ours, single).within(tolerances.last_row())
        only_flips = measure(golden.selected_logits, single).within(tolerances.free_last_row())
        if not (equal and only_flips and (comparison.stage_ref.checkpoint == "09" or ours.argmax() == single.argmax())):
            return comparison
        reason = comparison.note or f"error {comparison.difference.error:.1e}"
        return as_tie(comparison, f"{reason}; equal to llama.cpp's result for all rows in one batch")

    def _margins(self, runner: Runner) -> Margins:
        """Find between which tokens rounding decides: by float64 logits, under ggml numerics by llama.cpp's pass."""
        if self.rounds:
            logits, first = next(iter(self.engine_outputs.values())).traces["near"]["logits"], len(self.prompt) - 1
            return Margins(logits[first:], None, self._limits_for(runner, "near").free_variances[first:])
        if self.reference is None:
            return NOTHING_KNOWN
        moved = MATHEMATICS.worst if runner.dtype == "float64" else self._limits_for(runner, "near").moved()
        return Margins(self.reference.step_logits, self.reference.engine_output.greedy, moved)

    def sampler_inputs(self) -> tuple[np.ndarray, Sequence[int]]:
        """Return the logits and history that the filters are shown."""
        return sampler_inputs(self.cases["near"].ids, self.weights.config.vocab_size)

    def _isolated_limit(self, runner: Runner, case: str, stage: Stage, key: str) -> Tolerance:
        if runner.dtype == "float64":
            return EXACT if stage.name in COPIES else MATHEMATICS
        return self._limits_for(runner, case).isolated(key)

    def softmax_limit(self) -> Tolerance:
        """Return the tolerance of distributions, which are made from float32 logits."""
        return widened(
            limit_of_softmax(self.weights.config.vocab_size), self._distances.get(("near", "isolated", "probabilities"))
        )

    def _isolated_error(self, engine: str, case: str, key: str) -> float:
        """Return the error of a golden against float64 on the golden's own inputs; NaN without a float64 reference."""
        if self.reference is None or engine == FLOAT64_REFERENCE:
            return math.nan if self.reference is None else 0.0
        return self.reference.isolated[engine][case][key].error

    def _measure_engines(self) -> None:
        """Measure the engines' largest distances from the float64 reference, for a stage in all layers."""
        if self.reference is None:
            return
        near, logits = self.reference.engine_output, BY_NAME["logits"]
        for engine, shown in self.engine_outputs.items():
            self._note(
                "near", CHAINED, "selected_logits", distance(shown.selected_logits, near.selected_logits, logits)
            )
            for name, golden in shown.probabilities.items():
                self._note("near", ISOLATED, "probabilities", distance(golden, near.probabilities[name], logits))
            for case in self.cases:
                true, found = near.traces[case], self.reference.isolated[engine][case]
                for layer in range(self.weights.config.n_layers):
                    if key(ATTENTION, layer) in found:
                        self._note(case, ISOLATED, ATTENTION, found[key(ATTENTION, layer)])
                for name, stage, _ in self._keys:
                    self._note(case, ISOLATED, stage.name, found[name])
                    self._note(case, CHAINED, stage.name, distance(shown.traces[case][name], true[name], stage))

    def _note(self, case: str, mode: int, stage: str, found: Difference) -> None:
        """Keep the largest difference of a stage so far, by case and mode; a fault is not kept."""
        place = case, ("isolated", "chained")[mode], stage
        old = self._distances.get(place, Difference(0.0, 0.0))
        if found.fault is None:
            self._distances[place] = Difference(max(old.error, found.error), max(old.worst, found.worst))

    def _require_all_stages(self, engine: str, case: str, trace: Mapping[str, np.ndarray]) -> None:
        wrong = sorted(trace.keys() ^ {key for key, _, _ in self._keys})
        if wrong:
            raise UserError(
                f"{self.model}: expected the {len(self._keys)} stages of the model in the {case} trace of {engine}; "
                f"missing or unknown: {', '.join(wrong[:5])}; run reference_outputs/regenerate.py"
            )


def _with_flips(comparison: Comparison, flips: int, refused: int) -> Comparison:
    """Add the flips of a stage to a comparison; a refused flip fails it."""
    if refused:
        note = f"{refused} values round to other numbers, although they are not at a rounding edge"
        comparison = replace(comparison, verdict=FAIL, note=comparison.note or note)
    return replace(comparison, flips=flips) if flips else comparison
