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
from llorch.judging.expert_selection import ExpertSelection, GoOn, as_made
from llorch.judging.goldens.float64_reference import WITNESS
from llorch.judging.goldens.forward import SAMPLINGS, EngineOutput, Truth, sampler_inputs
from llorch.judging.judge import Comparison, Expectation, judge, routed, tied
from llorch.judging.runners import Runner, See
from llorch.judging.runners.shared import SharedWeights
from llorch.judging.tolerances.forward import (
    MATHEMATICS,
    NOTHING_KNOWN,
    SCORES,
    Limits,
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
        evidence: Mapping[str, EngineOutput],
        truth: Truth | None,
        *,
        n_prompt: int | None = None,
    ) -> None:
        """Prepare; nothing is computed yet.

        Args:
            model: Its name in the rows.
            weights: The model in float32, with its numerics.
            cases: The inputs.
            evidence: Outputs of each reference engine for them.
            truth: The float64 reference; None where no engine has it: tolerances are then only the derived ones.
            n_prompt: Tokens of `near` before the greedy text, where it holds that too.

        Raises:
            ValueError: A trace has not exactly the stages of the model.
        """
        self.model, self.weights, self.cases, self.evidence, self.truth = model, weights, cases, evidence, truth
        self.prompt = cases["near"].ids[:n_prompt] if "near" in cases else ()
        self._keys = list(keys(weights.config))
        self._places = {name: (stage, layer) for name, stage, layer in self._keys}
        self._choices = [name for name, stage, _ in self._keys if stage.is_choice]
        self._limits: dict[tuple[str, str, bool], Limits] = {}
        self._distances: dict[tuple[str, str, str], Difference] = {}
        self._errors: dict[tuple[str, str, int, str], float] = {}
        for producer, shown in evidence.items():
            for case in cases:
                self._require_all_stages(producer, case, shown.traces[case])
        self._measure_producers()

    def rows(self, runner: Runner) -> list[Comparison]:
        """Judge everything that a runner computes, in the order of the forward pass for each mode."""
        sampled = [
            lambda: self._last_row(runner),
            lambda: runner.text(self.prompt, self.n_greedy(runner)),
        ]
        *judged, last, text = self._made(runner, [*self._stage_passes(runner), *self._decode_passes(runner), *sampled])
        with runner.arithmetic():
            rows = chain(chain.from_iterable(judged), self._sampler_rows(runner, last, text))
            return list(routed(rows, self.routes))

    @property
    def routes(self) -> Mapping[str, LoadPath]:
        """Load path of the file into each reference engine."""
        true = {WITNESS: self.truth.evidence} if self.truth is not None else {}
        return {name: shown.route for name, shown in {**self.evidence, **true}.items()}

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
            for witness, golden in self.witnesses(runner).items():
                claim = partial(self.isolated, runner, case, witness)
                yield partial(self._seen, runner, [claim], partial(runner.isolated, this, golden.traces[case]))
            for witnesses in self._agreeing(runner, case):
                yield partial(self._chained_rows, runner, case, witnesses)

    def _decode_passes(self, runner: Runner) -> Iterator[Callable[[], list[Comparison]]]:
        for case, this in self.cases.items():
            for n_cached, witnesses in product(this.splits, self._agreeing(runner, case)):
                yield partial(self._chained_rows, runner, case, witnesses, n_cached)

    def _agreeing(self, runner: Runner, case: str) -> list[list[str]]:
        """Group the reference engines that chose the same experts.

        llorch runs once for each group, with the group's expert selection.
        """
        found: dict[bytes, list[str]] = {}
        for witness, golden in self.witnesses(runner).items():
            chosen = (golden.traces[case][name].tobytes() for name in self._choices)
            found.setdefault(b"".join(chosen), []).append(witness)
        return [*found.values()]

    def _chained_rows(self, runner: Runner, case: str, witnesses: Sequence[str], n_cached: int = 0) -> list[Comparison]:
        """Compare llorch's own pass with engines that chose the same experts."""
        claims = [partial(self.chained, runner, case, witness, n_cached) for witness in witnesses]
        go_on = self._going_on(runner, case, witnesses[0])
        rows = self._seen(
            runner, claims, partial(runner.chained, case, self.cases[case], n_cached=n_cached, go_on=go_on)
        )
        return [*rows, self._free_row(runner, case, rows)] if self.rounds and not n_cached else rows

    def _going_on(self, runner: Runner, case: str, witness: str) -> GoOn:
        """Make a function that continues with a reference engine's expert selection where llorch's is as good."""

        def go_on(name: str, array: np.ndarray, start: int) -> np.ndarray:
            if name not in self._choices:
                return array
            return self._choice(runner, "chained", case, witness, name, start, start + len(array)).settled(array)

        return go_on if self._choices else as_made

    def _choice(
        self, runner: Runner, mode: str, case: str, witness: str, name: str, start: int = 0, stop: int | None = None
    ) -> ExpertSelection:
        """Return a reference engine's expert selection for the tokens from `start` on.

        A chained selection uses the logits of the float64 reference, if there is one. An isolated selection uses the
        logits of the reference engine.
        """
        golden, (stage, layer) = self.witnesses(runner)[witness].traces[case], self._places[name]
        best = self.truth.evidence.traces[case] if self.truth is not None else golden
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
        return {witness: row for group, row in rows for witness in group}

    def _seen(
        self, runner: Runner, claims: Sequence[Callable[..., Expectation]], run: Callable[[See], None]
    ) -> list[Comparison]:
        """Compare the stages of one pass, each as soon as it is there; a stage that never comes fails."""
        rows: dict[str, list[Comparison]] = {}

        def judged(name: str, array: np.ndarray | None) -> list[Comparison]:
            return [judge(claim(name), array, model=self.model, backend=runner.name) for claim in claims]

        def see(name: str, array: np.ndarray, *, flips: int = 0, refused: int = 0) -> None:
            rows[name] = [_with_flips(row, flips, refused) for row in judged(name, array)]

        run(see)
        shown = (name for name, stage, _ in self._keys if stage.name not in runner.hidden)
        return [row for name in shown for row in rows.get(name) or judged(name, None)]

    @property
    def rounds(self) -> bool:
        """True if values flip: under ggml numerics."""
        return self.weights.numerics.rounds_activations

    def witnesses(self, runner: Runner) -> Mapping[str, EngineOutput]:
        """Return the reference engines that a runner has to reproduce; in float64 only the float64 reference."""
        if runner.dtype != "float64":
            return self.evidence
        return {WITNESS: self.truth.evidence} if self.truth is not None else {}

    def isolated(self, runner: Runner, case: str, witness: str, name: str) -> Expectation:
        """Build the expectation of a stage that receives the inputs that the golden received."""
        stage, layer = self._places[name]
        choice = self._choice(runner, "isolated", case, witness, name) if stage.is_choice else None
        fused = runner.hidden >= SCORES and stage.name == "attn_context"
        return Expectation(
            StageRef(stage.checkpoint, stage.name, layer, case),
            "isolated",
            witness,
            self.witnesses(runner)[witness].traces[case][name],
            self._isolated_limit(runner, case, stage, name),
            witness_error=self._isolated_error(witness, case, key(ATTENTION, layer) if fused else name),
            masked=stage.masked,
            token_axis=token_axis(stage),
            choice=choice,
        )

    def chained(self, runner: Runner, case: str, witness: str, n_cached: int, name: str) -> Expectation:
        """Build the expectation of a stage in llorch's own pass, or in the second part of that pass."""
        (stage, layer), stop = self._places[name], len(self.cases[case].ids)
        true = self.truth.evidence.traces[case][name] if self.truth is not None else None
        want = part_of(stage, self.witnesses(runner)[witness].traces[case][name], n_cached, stop)
        at = witness, case, n_cached, name
        claim = Expectation(
            StageRef("03" if n_cached else stage.checkpoint, stage.name, layer, case, n_cached=n_cached),
            "decode" if n_cached else "chained",
            witness,
            want,
            self._chained_limit(runner, case, witness, name, n_cached),
            truth=want if witness == WITNESS else None if true is None else part_of(stage, true, n_cached, stop),
            witness_error=self._errors.get(at),
            masked=stage.masked,
            token_axis=token_axis(stage),
            choice=self._choice(runner, "chained", case, witness, name, n_cached) if stage.is_choice else None,
        )
        if witness != WITNESS:
            self._errors[at] = claim.of_witness  # the same for every runner
        return claim

    def _chained_limit(self, runner: Runner, case: str, witness: str, name: str, n_cached: int) -> Tolerance:
        if witness == WITNESS:
            return self.limits(case).in_float64(name, n_cached)
        return self._limits_for(runner, case).chained(name, n_cached)

    def limits(self, case: str, dtype: str = "float32", *, fused: bool = False) -> Limits:
        """Return the tolerances of a case, for runs in a dtype; fused attention shows no scores."""
        if (case, dtype, fused) not in self._limits:
            golden = self.truth.evidence if self.truth is not None else next(iter(self.evidence.values()))
            self._limits[case, dtype, fused] = Limits(
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

    def _limits_for(self, runner: Runner, case: str) -> Limits:
        return self.limits(case, runner.dtype, fused=runner.hidden >= SCORES)

    def sampler_rows(self, runner: Runner) -> Iterator[Comparison]:
        """Compare checkpoints 09 to 12: the row that sampling sees, its argmax, distributions, greedy text."""
        return self._sampler_rows(runner, self._last_row(runner), runner.text(self.prompt, self.n_greedy(runner)))

    def n_greedy(self, runner: Runner) -> int:
        """Count the tokens of the greedy text."""
        return max((len(golden.greedy) for golden in self.witnesses(runner).values()), default=0)

    def _sampler_rows(self, runner: Runner, last: Mapping[str, np.ndarray], text: np.ndarray) -> Iterator[Comparison]:
        """Compare checkpoints 09 to 12.

        `last` has llorch's last row of logits for each reference engine, `text` the token ids of its greedy text.
        """
        distributions = runner.probabilities(*self.sampler_inputs())
        tokens = self.tokens(runner)
        first = (
            GreedyJudge(self.model, runner, self.prompt, NOTHING_KNOWN) if self.rounds else tokens
        )  # `_beside_one_pass`
        for witness, golden in self.witnesses(runner).items():
            row, best = last[witness], np.asarray([greedy(last[witness])])
            selected = judge(self.selected(runner, witness), row, model=self.model, backend=runner.name)
            argmax = first.row("10", "argmax", witness, best, np.asarray([int(np.argmax(golden.selected_logits))]))
            yield from (self._beside_one_pass(runner, each, row, golden) for each in (selected, argmax))
            for name in golden.probabilities:
                yield self.distribution_row(runner, self.distribution(runner, witness, name), distributions[name])
            yield tokens.row("12", "generation", witness, text, golden.greedy)

    def tokens(self, runner: Runner) -> GreedyJudge:
        """Make the judge of tokens at checkpoints 10 and 12, where rounding decides near-ties."""
        return GreedyJudge(self.model, runner, self.prompt, self._margins(runner))

    def selected(self, runner: Runner, witness: str) -> Expectation:
        """Checkpoint 09: the row that sampling sees."""
        limit = MATHEMATICS if witness == WITNESS else self._limits_for(runner, "near").last_row()
        true = self.truth.evidence.selected_logits if self.truth is not None else None
        want = self.witnesses(runner)[witness].selected_logits
        return Expectation(StageRef("09", "selected_logits"), "chained", witness, want, limit, truth=true)

    def distribution(self, runner: Runner, witness: str, name: str) -> Expectation:
        """Checkpoint 11: what one of `SAMPLINGS` makes of `sampler_inputs`."""
        true = self.truth.evidence.probabilities[name] if self.truth is not None else None
        want = self.witnesses(runner)[witness].probabilities[name]
        allowed = MATHEMATICS if runner.dtype == "float64" else self.softmax_limit()
        return Expectation(StageRef("11", "probabilities", part=name), "isolated", witness, want, allowed, truth=true)

    def distribution_row(self, runner: Runner, claim: Expectation, ours: np.ndarray) -> Comparison:
        """Compare a distribution with its expectation: a TIE if only tokens at the edge of top-p differ."""
        row = judge(claim, ours, model=self.model, backend=runner.name)
        if row.verdict != FAIL:
            return row
        settings, (logits, _) = SAMPLINGS[claim.place.part or ""], self.sampler_inputs()
        edge = edge_of_top_p(ours, claim.want, logits, settings, claim.limit)
        return tied(row, edge) if edge else row

    def _free_row(self, runner: Runner, case: str, chained: Sequence[Comparison]) -> Comparison:
        """Judge the run as users get it, with nothing replaced; the tolerance covers the effect of flips only."""
        witness, golden = next(iter(self.evidence.items()))
        claim = Expectation(
            StageRef("08", "logits", None, case), "free", witness, golden.traces[case]["logits"],
            self._limits_for(runner, case).free(), token_axis=0,
        )  # fmt: skip
        row = judge(claim, runner.free(self.cases[case]), model=self.model, backend=runner.name)  # type: ignore[attr-defined]
        n_flips = sum(each.flips for each in chained)
        said = f"{n_flips} values flip; without replacing them, the error is {row.error:.1e}"
        return replace(row, note=row.note or said)

    def _beside_one_pass(self, runner: Runner, row: Comparison, ours: np.ndarray, golden: EngineOutput) -> Comparison:
        """Mark a failing row as a tie if flips explain it: llorch equals llama.cpp's result for all rows in one batch.

        With one row of logits llama.cpp adds in another order than with many rows. The two results may differ by the
        effect of flips.
        """
        if row.verdict != FAIL or not self.rounds:
            return row
        limits, single = self._limits_for(runner, "near"), golden.traces["near"]["logits"][-1]
        equal = measure(ours, single).within(limits.last_row())
        only_flips = measure(golden.selected_logits, single).within(limits.free_last_row())
        if not (equal and only_flips and (row.checkpoint == "09" or ours.argmax() == single.argmax())):
            return row
        note = f"{row.note or f'error {row.error:.1e}'}; equal to llama.cpp's result for all rows in one batch"
        return tied(row, note)

    def _margins(self, runner: Runner) -> Margins:
        """Find between which tokens rounding decides: by float64 logits, under ggml numerics by llama.cpp's pass."""
        if self.rounds:
            logits, first = next(iter(self.evidence.values())).traces["near"]["logits"], len(self.prompt) - 1
            return Margins(logits[first:], None, self._limits_for(runner, "near").free_variances[first:])
        if self.truth is None:
            return NOTHING_KNOWN
        moved = MATHEMATICS.worst if runner.dtype == "float64" else self._limits_for(runner, "near").moved()
        return Margins(self.truth.step_logits, self.truth.evidence.greedy, moved)

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

    def _isolated_error(self, witness: str, case: str, key: str) -> float:
        """Return the error of a golden against float64 on the golden's own inputs; NaN without a float64 reference."""
        if self.truth is None or witness == WITNESS:
            return math.nan if self.truth is None else 0.0
        return self.truth.isolated[witness][case][key].error

    def _measure_producers(self) -> None:
        """Measure the engines' largest distances from the float64 reference, for a stage in all layers."""
        if self.truth is None:
            return
        near, logits = self.truth.evidence, BY_NAME["logits"]
        for witness, shown in self.evidence.items():
            self._note(
                "near", CHAINED, "selected_logits", distance(shown.selected_logits, near.selected_logits, logits)
            )
            for name, golden in shown.probabilities.items():
                self._note("near", ISOLATED, "probabilities", distance(golden, near.probabilities[name], logits))
            for case in self.cases:
                true, found = near.traces[case], self.truth.isolated[witness][case]
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

    def _require_all_stages(self, producer: str, case: str, trace: Mapping[str, np.ndarray]) -> None:
        wrong = sorted(trace.keys() ^ {key for key, _, _ in self._keys})
        if wrong:
            raise UserError(
                f"{self.model}: expected the {len(self._keys)} stages of the model in the {case} trace of {producer}; "
                f"missing or unknown: {', '.join(wrong[:5])}; run reference_outputs/regenerate.py"
            )


def _with_flips(row: Comparison, flips: int, refused: int) -> Comparison:
    """Add the flips of a stage to a comparison; a refused flip fails it."""
    if refused:
        note = f"{refused} values round to other numbers, although they are not at a rounding edge"
        row = replace(row, verdict=FAIL, note=row.note or note)
    return replace(row, flips=flips) if flips else row
