"""Checkpoints 00 to 12: every stage and layer of the forward pass, the cache, and what sampling makes of the logits.

There are two comparisons. *Mathematics*: llorch in float64 is compared with the float64 reference, which transformers
computes, at 1e-12; a constant that is wrong by a millionth shows. *Arithmetic*: llorch in another dtype is compared
with every golden, at the tolerances of `tolerances`. No tolerance is made of numbers that llorch computed.

Every stage is judged *isolated*, in a pass in which the golden takes the place of each stage as soon as it was
recorded, and *chained*, in llorch's own pass; *decode* rows are chained, behind a cache that another pass filled. With
exact numerics NumPy begins a third pass between the two, of other tokens, and ends it in the middle: it leaves nothing.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from llorch.engines import LoadPath
from llorch.files import Weights
from llorch.judging.expectations.tokens import GreedyJudge
from llorch.judging.expert_selection import ExpertSelection, StageOverride, as_made
from llorch.judging.goldens.float64_reference import FLOAT64_REFERENCE
from llorch.judging.goldens.forward import EngineOutput, ReferenceOutput, sampler_inputs
from llorch.judging.runners import Runner
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
from llorch.judging.types import Expectation
from llorch.runtime.errors import UserError
from llorch.stages.comparison import EXACT, Difference, Tolerance, distance
from llorch.stages.stage_ref import Pass, StageRef, part_of
from llorch.stages.table import ATTENTION, BY_NAME, input_keys, key, keys

COPIES = ("embed", "k_cache", "v_cache", "conv_state")  # isolated they are exact: nothing is computed


class ForwardExpectations:
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
        """Prepare; nothing is computed yet. ValueError: a trace has not exactly the stages of the model.

        Weights are those of the model in float32, with its numerics. Without a float64 `reference` tolerances are only
        the derived ones. `n_prompt` counts the tokens of `near` before the greedy text, if it holds that, too.
        """
        self.model, self.weights, self.cases = model, weights, cases
        self.engine_outputs, self.reference = engine_outputs, reference
        self.prompt = cases["near"].ids[:n_prompt] if "near" in cases else ()
        self.keys = list(keys(weights.config))
        self._places = {name: (stage, layer) for name, stage, layer in self.keys}
        self._choices = [name for name, stage, _ in self.keys if stage.is_choice]
        self._limits: dict[tuple[str, str, bool], ForwardTolerances] = {}
        self._distances: dict[tuple[str, str, str], Difference] = {}
        self._errors: dict[tuple[str, str, int, str], float] = {}
        for engine, shown in engine_outputs.items():
            for case in cases:
                self._require_all_stages(engine, case, shown.traces[case])
        self._measure_engines()

    @property
    def load_paths(self) -> Mapping[str, LoadPath]:
        """Load path of the file into each reference engine."""
        true = {FLOAT64_REFERENCE: self.reference.engine_output} if self.reference is not None else {}
        return {name: shown.load_path for name, shown in {**self.engine_outputs, **true}.items()}

    def agreeing_engines(self, runner: Runner, case: str) -> list[list[str]]:
        """Group the reference engines that chose the same experts.

        llorch runs once for each group, with the group's expert selection.
        """
        found: dict[bytes, list[str]] = {}
        for engine, golden in self.engines(runner).items():
            expert_ids = (golden.traces[case][name].tobytes() for name in self._choices)
            found.setdefault(b"".join(expert_ids), []).append(engine)
        return [*found.values()]

    def override_selection(self, runner: Runner, case: str, engine: str) -> StageOverride:
        """Make a function that continues with a reference engine's expert selection where llorch's is as good."""

        def override(name: str, array: np.ndarray, start: int) -> np.ndarray:
            if name not in self._choices:
                return array
            selection = self.expert_selection(runner, "chained", case, engine, name, start, start + len(array))
            return selection.settled(array)

        return override if self._choices else as_made

    def expert_selection(
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
        else:
            scores = best[key("router_logits", layer)]
            if runner.dtype == "float64":
                variance = np.full_like(scores, np.square(MATHEMATICS.worst * np.abs(scores).max()))
            else:
                variance = self.tolerances_for(runner, case).chained_variance(key("router_logits", layer))
        part = slice(start, stop)
        return ExpertSelection(golden[name][part], scores[part], variance[part])

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
        stage_ref = StageRef(stage.checkpoint, stage.name, layer, case)
        expected = self.engines(runner)[engine].traces[case][name]
        if runner.dtype == "float64":
            tolerance = EXACT if stage.name in COPIES else MATHEMATICS
        else:
            tolerance = self.tolerances_for(runner, case).isolated(name)
        choice = self.expert_selection(runner, "isolated", case, engine, name) if stage.is_choice else None
        fused = runner.hidden >= SCORES and stage.name == "attn_context"
        error = self._isolated_error(engine, case, key(ATTENTION, layer) if fused else name)
        return Expectation(
            stage_ref, "isolated", engine, expected, tolerance, engine_error=error, stage=stage, expert_selection=choice
        )

    def chained(self, runner: Runner, case: str, engine: str, n_cached: int, name: str) -> Expectation:
        """Build the expectation of a stage in llorch's own pass, or in the second part of that pass."""
        (stage, layer), stop = self._places[name], len(self.cases[case].ids)
        stage_ref = StageRef("03" if n_cached else stage.checkpoint, stage.name, layer, case, n_cached=n_cached)
        mode = "decode" if n_cached else "chained"
        expected = part_of(stage, self.engines(runner)[engine].traces[case][name], n_cached, stop)
        choice = self.expert_selection(runner, "chained", case, engine, name, n_cached) if stage.is_choice else None
        if engine == FLOAT64_REFERENCE:
            tolerance = self.tolerances(case).in_float64(name, n_cached)
            return Expectation(
                stage_ref, mode, engine, expected, tolerance, reference=expected, stage=stage, expert_selection=choice
            )
        reference = None
        if self.reference is not None:
            reference = part_of(stage, self.reference.engine_output.traces[case][name], n_cached, stop)
        tolerance, place = self.tolerances_for(runner, case).chained(name, n_cached), (engine, case, n_cached, name)
        error = self._errors.get(place)
        expectation = Expectation(
            stage_ref, mode, engine, expected, tolerance, reference, error, stage, expert_selection=choice
        )
        self._errors[place] = expectation.engine_error_of_golden  # the same for every runner
        return expectation

    def tolerances(self, case: str, dtype: str = "float32", *, fused: bool = False) -> ForwardTolerances:
        """Return the tolerances of a case, for runs in a dtype; fused attention shows no scores."""
        if (case, dtype, fused) not in self._limits:
            reference = self.reference
            golden = next(iter(self.engine_outputs.values())) if reference is None else reference.engine_output

            def distance(mode: str, stage: str) -> Difference | None:
                as_one = fused and (mode, stage) == ("isolated", "attn_context")
                return self._distances.get((case, mode, ATTENTION if as_one else stage))

            self._limits[case, dtype, fused] = ForwardTolerances(
                self.weights, self.cases[case], golden.traces[case], ARITHMETICS[dtype], fused=fused, distance=distance
            )
        return self._limits[case, dtype, fused]

    def tolerances_for(self, runner: Runner, case: str) -> ForwardTolerances:
        """Return the tolerances of a case for a runner."""
        return self.tolerances(case, runner.dtype, fused=runner.hidden >= SCORES)

    def n_greedy(self, runner: Runner) -> int:
        """Count the tokens of the greedy text."""
        return max((len(golden.greedy) for golden in self.engines(runner).values()), default=0)

    def tokens(self, runner: Runner) -> GreedyJudge:
        """Make the judge of tokens at checkpoints 10 and 12, where rounding decides near-ties."""
        return GreedyJudge(self.model, runner, self.prompt, self.margins(runner))

    def selected(self, runner: Runner, engine: str) -> Expectation:
        """Checkpoint 09: the row that sampling sees."""
        tolerance = MATHEMATICS if engine == FLOAT64_REFERENCE else self.tolerances_for(runner, "near").last_row()
        true = self.reference.engine_output.selected_logits if self.reference is not None else None
        expected = self.engines(runner)[engine].selected_logits
        return Expectation(StageRef("09", "selected_logits"), "chained", engine, expected, tolerance, reference=true)

    def distribution(self, runner: Runner, engine: str, name: str) -> Expectation:
        """Checkpoint 11: what one of `SAMPLINGS` makes of `sampler_inputs`."""
        true = self.reference.engine_output.probabilities[name] if self.reference is not None else None
        expected = self.engines(runner)[engine].probabilities[name]
        tolerance = MATHEMATICS if runner.dtype == "float64" else self.softmax_limit()
        stage_ref = StageRef("11", "probabilities", part=name)
        return Expectation(stage_ref, "isolated", engine, expected, tolerance, reference=true)

    def margins(self, runner: Runner) -> Margins:
        """Find between which tokens rounding decides: by float64 logits, under ggml numerics by llama.cpp's pass."""
        if self.rounds:
            logits, first = next(iter(self.engine_outputs.values())).traces["near"]["logits"], len(self.prompt) - 1
            return Margins(logits[first:], None, self.tolerances_for(runner, "near").free_variances[first:])
        if self.reference is None:
            return NOTHING_KNOWN
        moved = MATHEMATICS.worst if runner.dtype == "float64" else self.tolerances_for(runner, "near").moved()
        return Margins(self.reference.step_logits, self.reference.engine_output.greedy, moved)

    def sampler_inputs(self) -> tuple[np.ndarray, Sequence[int]]:
        """Return the logits and history that the filters are shown."""
        return sampler_inputs(self.cases["near"].ids, self.weights.config.vocab_size)

    def softmax_limit(self) -> Tolerance:
        """Return the tolerance of distributions, which are made from float32 logits."""
        distance = self._distances.get(("near", "isolated", "probabilities"))
        return widened(limit_of_softmax(self.weights.config.vocab_size), distance)

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
            selected = distance(shown.selected_logits, near.selected_logits, logits)
            self._note("near", CHAINED, "selected_logits", selected)
            for name, golden in shown.probabilities.items():
                self._note("near", ISOLATED, "probabilities", distance(golden, near.probabilities[name], logits))
            for case in self.cases:
                true, found = near.traces[case], self.reference.isolated[engine][case]
                for layer in range(self.weights.config.n_layers):
                    if key(ATTENTION, layer) in found:
                        self._note(case, ISOLATED, ATTENTION, found[key(ATTENTION, layer)])
                for name, stage, _ in self.keys:
                    self._note(case, ISOLATED, stage.name, found[name])
                    self._note(case, CHAINED, stage.name, distance(shown.traces[case][name], true[name], stage))

    def _note(self, case: str, mode: int, stage: str, found: Difference) -> None:
        """Keep the largest difference of a stage so far, by case and mode; a fault is not kept."""
        place = case, ("isolated", "chained")[mode], stage
        old = self._distances.get(place, Difference(0.0, 0.0))
        if found.fault is None:
            self._distances[place] = Difference(max(old.error, found.error), max(old.worst, found.worst))

    def _require_all_stages(self, engine: str, case: str, trace: Mapping[str, np.ndarray]) -> None:
        wrong = sorted(trace.keys() ^ {key for key, _, _ in self.keys})
        if wrong:
            expected = f"expected the {len(self.keys)} stages of the model in the {case} trace of {engine}"
            actual = f"missing or unknown: {', '.join(wrong[:5])}"
            raise UserError(f"{self.model}: {expected}; {actual}; run reference_outputs/regenerate.py")
