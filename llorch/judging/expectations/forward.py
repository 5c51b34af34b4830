"""Expected arrays of every stage and layer of the forward pass, the cache, and sampling (validation points 00 to 12).

There are two comparisons. *Mathematics*: llorch in float64 is compared with the float64 reference of transformers at
1e-12, so a constant that is wrong by one part in a million fails. *Arithmetic*: llorch in another dtype is compared
with every golden (array of a reference engine), at the tolerances of `tolerances`. No tolerance is derived from numbers
that llorch computed. A *case* is an input: `near` starts at position 0, `far` at about 4,000.

Every stage is compared *isolated*, in a pass that replaces each recorded stage by the golden, and *chained*, in a pass
of llorch that replaces only near-ties of selected experts and, under ggml numerics, flips: values that products round
to other codes than the golden's. *decode* comparisons are chained too, after a prefill that filled the cache.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from llorch.engines import LoadPath
from llorch.files import Weights
from llorch.judging.expectations.tokens import GreedyJudge
from llorch.judging.expert_selection import ExpertSelection, StageOverride, identity
from llorch.judging.goldens.float64_reference import FLOAT64_REFERENCE
from llorch.judging.goldens.forward import EngineOutput, ReferenceOutput, sampler_inputs
from llorch.judging.runners import Runner
from llorch.judging.tolerances.forward import (
    MATHEMATICS,
    NO_TIES,
    SCORES,
    ForwardTolerances,
    Margins,
    limit_of_softmax,
    widen,
)
from llorch.judging.tolerances.rounding import ARITHMETICS, CHAINED, FLOAT32, ISOLATED
from llorch.judging.types import Expectation
from llorch.runtime.errors import UserError
from llorch.stages.comparison import EXACT, Difference, Tolerance, distance
from llorch.stages.stage_ref import Pass, StageRef, part_of
from llorch.stages.table import ATTENTION, BY_NAME, input_keys, key, keys

COPIES = ("embed", "k_cache", "v_cache", "conv_state")  # isolated, these stages only copy: tolerance 0


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
        """Prepare the expectations; raise UserError if a trace has other stages than the model.

        `weights` are the float32 weights of the model, with its numerics. Without a float64 `reference`, tolerances
        come from rounding only. `n_prompt` is the number of prompt tokens if `near` is a prompt and its greedy text.
        """
        self.model, self.weights, self.cases = model, weights, cases
        self.engine_outputs, self.reference = engine_outputs, reference
        self.prompt = cases["near"].ids[:n_prompt] if "near" in cases else ()
        self.keys = list(keys(weights.config))
        self._stage_of = {name: (stage, layer) for name, stage, layer in self.keys}
        self._selection_names = [name for name, stage, _ in self.keys if stage.is_selection]
        self._tolerances: dict[tuple[str, str, bool], ForwardTolerances] = {}
        self._distances: dict[tuple[str, str, str], Difference] = {}
        self._errors: dict[tuple[str, str, int, str], float] = {}
        for engine, output in engine_outputs.items():
            for case in cases:
                self._require_all_stages(engine, case, output.traces[case])
        self._measure_engines()

    @property
    def load_paths(self) -> Mapping[str, LoadPath]:
        """Load path of the file into each reference engine."""
        reference = {FLOAT64_REFERENCE: self.reference.engine_output} if self.reference is not None else {}
        return {name: output.load_path for name, output in {**self.engine_outputs, **reference}.items()}

    def agreeing_engines(self, runner: Runner, case: str) -> list[list[str]]:
        """Group the reference engines that selected the same experts in a case; llorch runs once for each group."""
        groups: dict[bytes, list[str]] = {}
        for engine, golden in self.engines(runner).items():
            expert_ids = (golden.traces[case][name].tobytes() for name in self._selection_names)
            groups.setdefault(b"".join(expert_ids), []).append(engine)
        return [*groups.values()]

    def override_selection(self, runner: Runner, case: str, engine: str) -> StageOverride:
        """Return an override that replaces llorch's expert selection by the engine's if rounding explains it."""

        def override(name: str, array: np.ndarray, start: int) -> np.ndarray:
            if name not in self._selection_names:
                return array
            selection = self.expert_selection(runner, "chained", case, engine, name, start, start + len(array))
            return selection.settled(array)

        return override if self._selection_names else identity

    def expert_selection(
        self, runner: Runner, mode: str, case: str, engine: str, name: str, start: int = 0, stop: int | None = None
    ) -> ExpertSelection:
        """Return a reference engine's expert selection for the tokens from `start` to `stop`.

        Scores of a chained selection are the router logits of the float64 reference, else of the engine, with their
        variance. Those of an isolated selection are the inputs of the stage, the engine's.
        """
        golden, (stage, layer) = self.engines(runner)[engine].traces[case], self._stage_of[name]
        reference = self.reference.engine_output.traces[case] if self.reference is not None else golden
        if mode == "isolated":
            scores = golden[input_keys(stage, layer, self.weights.config)[0]]
            arithmetic = ARITHMETICS.get(runner.dtype, FLOAT32)
            variance = arithmetic.rounding(scores) if arithmetic.is_half else np.zeros_like(scores)
        else:
            scores = reference[key("router_logits", layer)]
            if runner.dtype == "float64":
                variance = np.full_like(scores, np.square(MATHEMATICS.worst * np.abs(scores).max()))
            else:
                variance = self.tolerances_for(runner, case).chained_variance(key("router_logits", layer))
        part = slice(start, stop)
        return ExpertSelection(golden[name][part], scores[part], variance[part])

    @property
    def rounds(self) -> bool:
        """True under ggml numerics, in which products round their inputs to codes, and values can flip."""
        return self.weights.numerics.rounds_activations

    def engines(self, runner: Runner) -> Mapping[str, EngineOutput]:
        """Return the engine outputs that a runner must reproduce; in float64, only the float64 reference, if any."""
        if runner.dtype != "float64":
            return self.engine_outputs
        return {FLOAT64_REFERENCE: self.reference.engine_output} if self.reference is not None else {}

    def isolated(self, runner: Runner, case: str, engine: str, name: str) -> Expectation:
        """Build the expectation of a stage whose inputs are the golden's."""
        stage, layer = self._stage_of[name]
        stage_ref = StageRef(stage.checkpoint, stage.name, layer, case)
        expected = self.engines(runner)[engine].traces[case][name]
        if runner.dtype == "float64":
            tolerance = EXACT if stage.name in COPIES else MATHEMATICS
        else:
            tolerance = self.tolerances_for(runner, case).isolated(name)
        chosen = self.expert_selection(runner, "isolated", case, engine, name) if stage.is_selection else None
        fused = runner.hidden >= SCORES and stage.name == "attn_context"  # q, k and v give the context in one step
        error = self._isolated_error(engine, case, key(ATTENTION, layer) if fused else name)
        return Expectation(
            stage_ref, "isolated", engine, expected, tolerance, engine_error=error, stage=stage, expert_selection=chosen
        )

    def chained(self, runner: Runner, case: str, engine: str, n_cached: int, name: str) -> Expectation:
        """Build the expectation of a stage in a chained pass, or in a decode pass after `n_cached` tokens."""
        (stage, layer), stop = self._stage_of[name], len(self.cases[case].ids)
        stage_ref = StageRef("03" if n_cached else stage.checkpoint, stage.name, layer, case, n_cached=n_cached)
        mode = "decode" if n_cached else "chained"
        expected = part_of(stage, self.engines(runner)[engine].traces[case][name], n_cached, stop)
        chosen = self.expert_selection(runner, "chained", case, engine, name, n_cached) if stage.is_selection else None
        if engine == FLOAT64_REFERENCE:
            tolerance = self.tolerances(case).in_float64(name, n_cached)
            return Expectation(
                stage_ref, mode, engine, expected, tolerance, reference=expected, stage=stage, expert_selection=chosen
            )
        reference = None
        if self.reference is not None:
            reference = part_of(stage, self.reference.engine_output.traces[case][name], n_cached, stop)
        tolerance, error_key = self.tolerances_for(runner, case).chained(name, n_cached), (engine, case, n_cached, name)
        error = self._errors.get(error_key)
        expectation = Expectation(
            stage_ref, mode, engine, expected, tolerance, reference, error, stage, expert_selection=chosen
        )
        self._errors[error_key] = expectation.engine_error_of_golden  # equal for every runner
        return expectation

    def tolerances(self, case: str, dtype: str = "float32", *, fused: bool = False) -> ForwardTolerances:
        """Return the tolerances of a case for a dtype, cached; `fused` attention does not expose its scores."""
        if (case, dtype, fused) not in self._tolerances:
            reference = self.reference
            golden = next(iter(self.engine_outputs.values())) if reference is None else reference.engine_output

            def distance(mode: str, stage: str) -> Difference | None:
                is_fused = fused and (mode, stage) == ("isolated", "attn_context")
                return self._distances.get((case, mode, ATTENTION if is_fused else stage))

            self._tolerances[case, dtype, fused] = ForwardTolerances(
                self.weights, self.cases[case], golden.traces[case], ARITHMETICS[dtype], fused=fused, distance=distance
            )
        return self._tolerances[case, dtype, fused]

    def tolerances_for(self, runner: Runner, case: str) -> ForwardTolerances:
        """Return the tolerances of a case for a runner."""
        return self.tolerances(case, runner.dtype, fused=runner.hidden >= SCORES)

    def n_greedy(self, runner: Runner) -> int:
        """Return the largest number of greedy tokens of an engine."""
        return max((len(golden.greedy) for golden in self.engines(runner).values()), default=0)

    def tokens(self, runner: Runner) -> GreedyJudge:
        """Create the comparison of greedy tokens, which may differ at near-ties (validation points 10 and 12)."""
        return GreedyJudge(self.model, runner, self.prompt, self.margins(runner))

    def selected(self, runner: Runner, engine: str) -> Expectation:
        """Build the expectation of the last token's logits, which sampling reads (validation point 09)."""
        tolerance = MATHEMATICS if engine == FLOAT64_REFERENCE else self.tolerances_for(runner, "near").last_row()
        logits = self.reference.engine_output.selected_logits if self.reference is not None else None
        expected = self.engines(runner)[engine].selected_logits
        return Expectation(StageRef("09", "selected_logits"), "chained", engine, expected, tolerance, reference=logits)

    def distribution(self, runner: Runner, engine: str, name: str) -> Expectation:
        """Build the expectation of a sampling distribution, for `SAMPLINGS[name]` (validation point 11)."""
        reference = self.reference.engine_output.probabilities[name] if self.reference is not None else None
        expected = self.engines(runner)[engine].probabilities[name]
        tolerance = MATHEMATICS if runner.dtype == "float64" else self.softmax_limit()
        stage_ref = StageRef("11", "probabilities", part=name)
        return Expectation(stage_ref, "isolated", engine, expected, tolerance, reference=reference)

    def margins(self, runner: Runner) -> Margins:
        """Return the margins of near-ties, from float64 logits, or from llama.cpp's logits under ggml numerics."""
        if self.rounds:
            logits, first = next(iter(self.engine_outputs.values())).traces["near"]["logits"], len(self.prompt) - 1
            return Margins(logits[first:], None, self.tolerances_for(runner, "near").free_variances[first:])
        if self.reference is None:
            return NO_TIES
        moved = MATHEMATICS.worst if runner.dtype == "float64" else self.tolerances_for(runner, "near").largest_swap()
        return Margins(self.reference.step_logits, self.reference.engine_output.greedy, moved)

    def sampler_inputs(self) -> tuple[np.ndarray, Sequence[int]]:
        """Return the logits and the token history that the sampling filters get."""
        return sampler_inputs(self.cases["near"].ids, self.weights.config.vocab_size)

    def softmax_limit(self) -> Tolerance:
        """Return the tolerance of sampling distributions, which the engines compute from float32 logits."""
        distance = self._distances.get(("near", "isolated", "probabilities"))
        return widen(limit_of_softmax(self.weights.config.vocab_size), distance)

    def _isolated_error(self, engine: str, case: str, key: str) -> float:
        """Return the error of a golden against the float64 output for its inputs; NaN without a float64 reference."""
        if self.reference is None or engine == FLOAT64_REFERENCE:
            return math.nan if self.reference is None else 0.0
        return self.reference.isolated[engine][case][key].error

    def _measure_engines(self) -> None:
        """Measure the engines' largest distance from the float64 reference over all layers, for each stage."""
        if self.reference is None:
            return
        reference, logits = self.reference.engine_output, BY_NAME["logits"]
        for engine, output in self.engine_outputs.items():
            selected = distance(output.selected_logits, reference.selected_logits, logits)
            self._record("near", CHAINED, "selected_logits", selected)
            for name, golden in output.probabilities.items():
                self._record("near", ISOLATED, "probabilities", distance(golden, reference.probabilities[name], logits))
            for case in self.cases:
                chained, isolated = reference.traces[case], self.reference.isolated[engine][case]
                for layer in range(self.weights.config.n_layers):
                    if key(ATTENTION, layer) in isolated:
                        self._record(case, ISOLATED, ATTENTION, isolated[key(ATTENTION, layer)])
                for name, stage, _ in self.keys:
                    self._record(case, ISOLATED, stage.name, isolated[name])
                    self._record(case, CHAINED, stage.name, distance(output.traces[case][name], chained[name], stage))

    def _record(self, case: str, mode: int, stage: str, new: Difference) -> None:
        """Record the largest difference of a stage so far, by case and mode; faults fail in their own comparison."""
        distance_key = case, ("isolated", "chained")[mode], stage
        old = self._distances.get(distance_key, Difference(0.0, 0.0))
        if new.fault is None:
            self._distances[distance_key] = Difference(max(old.error, new.error), max(old.worst, new.worst))

    def _require_all_stages(self, engine: str, case: str, trace: Mapping[str, np.ndarray]) -> None:
        wrong = sorted(trace.keys() ^ {key for key, _, _ in self.keys})
        if wrong:
            expected = f"expected the {len(self.keys)} stages of the model in the {case} trace of {engine}"
            actual = f"missing or unknown: {', '.join(wrong[:5])}"
            raise UserError(f"{self.model}: {expected}; {actual}; run reference_outputs/regenerate.py")
