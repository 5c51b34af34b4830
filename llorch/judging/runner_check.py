"""Comparisons of one runner with the expectations of the forward pass, as soon as it has computed each stage.

Modes: `isolated`, every stage on the golden's inputs; `chained`, on llorch's; `free`, chained without replacing flips.
A flip is a value that a product under ggml numerics rounds to another code than the golden's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any

import numpy as np

from llorch.judging.compare import as_tie, judge, with_load_paths
from llorch.judging.expectations.forward import ForwardExpectations
from llorch.judging.expectations.tokens import GreedyJudge, edge_of_top_p
from llorch.judging.goldens.forward import SAMPLINGS, EngineOutput
from llorch.judging.runners import Runner, StageObserver
from llorch.judging.runners.shared import SharedWeights
from llorch.judging.tolerances.forward import NO_TIES
from llorch.judging.types import Comparison, Expectation
from llorch.ops.sampling import greedy
from llorch.stages.comparison import FAIL, measure
from llorch.stages.stage_ref import StageRef
from llorch.stages.table import BY_NAME


def check_runner(expectations: ForwardExpectations, runner: Runner) -> list[Comparison]:
    """Compare all outputs of a runner, in the order of the forward pass for each mode."""
    return RunnerCheck(expectations, runner).comparisons()


class RunnerCheck:
    """Check of one runner: its stages, its cache and its sampling."""

    def __init__(self, expectations: ForwardExpectations, runner: Runner) -> None:
        """Prepare the check without computing anything."""
        self.expectations, self.runner = expectations, runner
        self._engines = expectations.engines(runner)
        self._judge = partial(judge, model=expectations.model, backend=runner.name)

    def comparisons(self) -> list[Comparison]:
        """Compare the stages, then the cache, then sampling, with the load paths of the engines."""
        *passes, last, text = self._run([*self._stage_passes(), *self._decode_passes(), self._last_row, self._text])
        with self.runner.arithmetic():
            comparisons = chain(chain.from_iterable(passes), self._sampler_rows(last, text))
            return list(with_load_paths(comparisons, self.expectations.load_paths))

    def stage_rows(self) -> list[Comparison]:
        """Compare every stage, isolated and chained, and logits with no flip replaced (validation points 00 to 08)."""
        return [*chain.from_iterable(self._run(list(self._stage_passes())))]

    def decode_rows(self) -> list[Comparison]:
        """Compare every stage of a pass after a prefill with the engines' single pass (validation point 03)."""
        return [*chain.from_iterable(self._run(list(self._decode_passes())))]

    def sampler_rows(self) -> Iterator[Comparison]:
        """Compare logits for sampling, their argmax, distributions and greedy text (validation points 09 to 12)."""
        return self._sampler_rows(self._last_row(), self._text())

    def _run(self, passes: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run the passes and return their results; with `SharedWeights`, run them layer by layer together."""
        with self.runner.arithmetic():
            if isinstance(self.expectations.weights, SharedWeights):
                return self.expectations.weights.together(passes)
            return [run_pass() for run_pass in passes]

    def _stage_passes(self) -> Iterator[Callable[[], list[Comparison]]]:
        for case, inputs in self.expectations.cases.items():
            for engine, golden in self._engines.items():
                expectation = partial(self.expectations.isolated, self.runner, case, engine)
                run = partial(self.runner.isolated, inputs, golden.traces[case])
                yield partial(self._observe, [expectation], run)
            for engines in self.expectations.agreeing_engines(self.runner, case):
                yield partial(self._chained_rows, case, engines)

    def _decode_passes(self) -> Iterator[Callable[[], list[Comparison]]]:
        for case, inputs in self.expectations.cases.items():
            for n_cached, engines in product(inputs.splits, self.expectations.agreeing_engines(self.runner, case)):
                yield partial(self._chained_rows, case, engines, n_cached)

    def _chained_rows(self, case: str, engines: Sequence[str], n_cached: int = 0) -> list[Comparison]:
        """Compare one chained or decode pass of llorch with engines that all selected the same experts."""
        expectations = [partial(self.expectations.chained, self.runner, case, engine, n_cached) for engine in engines]
        override = self.expectations.override_selection(self.runner, case, engines[0])
        inputs = self.expectations.cases[case]
        run = partial(self.runner.chained, case, inputs, n_cached=n_cached, override=override)
        comparisons = self._observe(expectations, run)
        if self.expectations.rounds and not n_cached:
            comparisons.append(self._free_row(case, comparisons))
        return comparisons

    def _observe(
        self, expectations: Sequence[Callable[[str], Expectation]], run: Callable[[StageObserver], None]
    ) -> list[Comparison]:
        """Compare the stages of one pass, each as soon as it is computed; a missing stage fails."""
        comparisons: dict[str, list[Comparison]] = {}

        def compare(name: str, array: np.ndarray | None) -> list[Comparison]:
            return [self._judge(expectation(name), array) for expectation in expectations]

        def observe(name: str, array: np.ndarray, *, flips: int = 0, refused: int = 0) -> None:
            comparisons[name] = [_with_flips(c, flips, refused) for c in compare(name, array)]

        run(observe)
        names = (name for name, stage, _ in self.expectations.keys if stage.name not in self.runner.hidden)
        return [c for name in names for c in comparisons.get(name) or compare(name, None)]

    def _last_row(self) -> Mapping[str, np.ndarray]:
        """Compute the logits of the last token for each reference engine, with the engine's expert selection."""
        rows: dict[str, np.ndarray] = {}
        for engines in self.expectations.agreeing_engines(self.runner, "near"):
            override = self.expectations.override_selection(self.runner, "near", engines[0])
            rows |= dict.fromkeys(engines, self.runner.last_row(self.expectations.cases["near"], override))
        return rows

    def _text(self) -> np.ndarray:
        return self.runner.text(self.expectations.prompt, self.expectations.n_greedy(self.runner))

    def _sampler_rows(self, last: Mapping[str, np.ndarray], text: np.ndarray) -> Iterator[Comparison]:
        """Compare sampling; `last` has llorch's last logits by reference engine, `text` llorch's greedy token ids."""
        expectations, runner = self.expectations, self.runner
        distributions = runner.probabilities(*expectations.sampler_inputs())
        tokens = expectations.tokens(runner)
        first = tokens
        if expectations.rounds:  # `_allow_batch_result` decides about ties
            first = GreedyJudge(expectations.model, runner, expectations.prompt, NO_TIES)
        for engine, golden in self._engines.items():
            row, best = last[engine], np.asarray([greedy(last[engine])])
            selected = self._judge(expectations.selected(runner, engine), row)
            best_token = np.asarray([int(np.argmax(golden.selected_logits))])
            argmax = first.comparison("10", "argmax", engine, best, best_token)
            yield from (self._allow_batch_result(comparison, row, golden) for comparison in (selected, argmax))
            for name in golden.probabilities:
                yield self.distribution_row(expectations.distribution(runner, engine, name), distributions[name])
            yield tokens.comparison("12", "generation", engine, text, golden.greedy)

    def distribution_row(self, expectation: Expectation, actual: np.ndarray) -> Comparison:
        """Compare a distribution with its expectation: a TIE if only tokens at the edge of top-p differ."""
        comparison = self._judge(expectation, actual)
        if comparison.verdict != FAIL:
            return comparison
        settings, (logits, _) = SAMPLINGS[expectation.stage_ref.part or ""], self.expectations.sampler_inputs()
        edge = edge_of_top_p(actual, expectation.expected, logits, settings, expectation.tolerance)
        return as_tie(comparison, edge) if edge else comparison

    def _free_row(self, case: str, chained: Sequence[Comparison]) -> Comparison:
        """Compare the logits of a run without replacing flips, as users run it; the tolerance includes flips."""
        engine, golden = next(iter(self.expectations.engine_outputs.items()))
        tolerance = self.expectations.tolerances_for(self.runner, case).free()
        stage_ref, expected = StageRef("08", "logits", None, case), golden.traces[case]["logits"]
        expectation = Expectation(stage_ref, "free", engine, expected, tolerance, stage=BY_NAME["logits"])
        comparison = self._judge(expectation, self.runner.free(self.expectations.cases[case]))  # type: ignore[attr-defined]
        n_flips = sum(c.flips for c in chained)
        note = f"{n_flips} values flip; without replacing them, the error is {comparison.difference.error:.1e}"
        return replace(comparison, note=comparison.note or note)

    def _allow_batch_result(self, comparison: Comparison, row: np.ndarray, golden: EngineOutput) -> Comparison:
        """Mark failing last logits as a TIE if llorch equals llama.cpp's logits from a pass of all tokens.

        llama.cpp sums in another order for one row of logits than for many, so its own two results may differ by flips.
        """
        if comparison.verdict != FAIL or not self.expectations.rounds:
            return comparison
        tolerances = self.expectations.tolerances_for(self.runner, "near")
        single = golden.traces["near"]["logits"][-1]
        equal = measure(row, single).within(tolerances.last_row())
        only_flips = measure(golden.selected_logits, single).within(tolerances.free_last_row())
        if not (equal and only_flips and (comparison.stage_ref.checkpoint == "09" or row.argmax() == single.argmax())):
            return comparison
        reason = comparison.note or f"error {comparison.difference.error:.1e}"
        return as_tie(comparison, f"{reason}; equal to llama.cpp's result for all rows in one batch")


def _with_flips(comparison: Comparison, flips: int, refused: int) -> Comparison:
    """Add the number of replaced flips to a comparison; `refused` flips, with errors beyond the tolerance, fail it."""
    if refused:
        note = f"{refused} values round to other numbers, although they are not at a rounding edge"
        comparison = replace(comparison, verdict=FAIL, note=comparison.note or note)
    return replace(comparison, flips=flips) if flips else comparison
