"""Score a mistake, or a setting with its best value: the share of a training dump's error that it explains.

`could_not_show` injects the known mistakes, and lists those that leave the dumped arrays unchanged.

Settings are fitted by Gauss-Newton steps. The golden section of `search.cause_search` stays within 8 times a listed
value, so it would miss a loss scaler that was left on, a factor of 1024. But it needs no slope, which most settings of
the forward pass do not have.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from llorch.diagnosis.attempt import NEAR_MISS, Attempt, Hypothesis, SettingFamily, best_by_name
from llorch.diagnosis.mistakes import TRAINING, Mistake
from llorch.diagnosis.mistakes.training_packing import PACKING
from llorch.diagnosis.mistakes.variants import VISIBLE
from llorch.diagnosis.training.hypotheses import OUTSIDE, RANDOM, group_of, may_see_each_other, possible_mistakes
from llorch.diagnosis.training.judge import TrainingJudge, key_of
from llorch.diagnosis.training.replay import FLOW, InjectedMistake, Key, ReplayedRun, TrainingReplay
from llorch.diagnosis.verdict import StageCheck
from llorch.engines.dumps.training_dump import TrainingDump
from llorch.families.config import ModelConfig
from llorch.lora.adapter import LORA_B, Adapter
from llorch.stages.comparison import FAIL, PASS, safe_ratio
from llorch.training.batch import IGNORED

OF_ONE_NUMBER = 0.999  # smallest share of the error of a single number that a cause without a fitted value explains
_MOVES, _NUDGE, _FARTHEST = 12, 1e-4, 3.0  # steps, finite difference and largest step of the logarithm

Cure = tuple[InjectedMistake, ...]  # injected changes that reproduce the errors found so far


class Scorer:
    """Scorer of causes for one wrong quantity; the changes `cure` of the causes named before stay injected."""

    def __init__(self, replay: TrainingReplay, judge: TrainingJudge, wrong: Sequence[StageCheck], cure: Cure) -> None:
        """Store the wrong checks of one group in one step."""
        self.replay, self.judge, self.wrong, self.cure = replay, judge, wrong, cure
        self.step = judge.steps[wrong[0].n_pass]
        self._stages = tuple(check.key for check in wrong if check.verdict == FAIL)

    def best_first(self, causes: Iterable[tuple[Hypothesis, ...]]) -> list[Attempt]:
        """Return the attempts that explain some of the error; complete explanations come first."""
        attempts = (self._attempt(cause) for cause in causes)
        explaining = (attempt for attempt in attempts if attempt.explained_share > 0)
        return sorted(explaining, key=lambda attempt: (attempt.remaining > 1, -round(attempt.explained_share, 6)))

    def choose(self, attempts: Sequence[Attempt]) -> tuple[Attempt | None, list[Attempt]]:
        """Choose the cause that explains the error and makes most of the dump right; also return equally good ones."""
        good = [attempt for attempt in attempts if attempt.remaining <= 1 and attempt.explained_share >= NEAR_MISS]
        counts = [self.n_right(attempt) for attempt in good]
        if max(counts, default=-1) < 0:
            return None, []
        best, *equals = [attempt for attempt, count in zip(good, counts, strict=True) if count == max(counts)]
        return best, best_by_name(attempt for attempt in equals if attempt.names.isdisjoint(best.names))[:3]

    def n_right(self, attempt: Attempt) -> int:
        """Count the arrays of the dump that are right with a cause; -1 if it fits this step or one number by chance."""
        run, first = self.replay.run(self.cure + changes_of(attempt)), self.wrong[0]
        checks = self.judge.checks(run)
        has_fitted_value = any(hypothesis.value for hypothesis in attempt.hypotheses)
        may_be_chance = has_fitted_value or attempt.explained_share < OF_ONE_NUMBER
        if may_be_chance and self._count_explained(run, checks) < 2:
            return -1
        later = (check for check in checks if check.n_pass > first.n_pass and check.stage == first.stage)
        has_number = any(hypothesis.kind == "setting" for hypothesis in attempt.hypotheses)
        if has_number and any(check.verdict == FAIL for check in later):
            return -1
        return sum(check.verdict == PASS for check in checks)

    def _count_explained(self, run: ReplayedRun, checks: Sequence[StageCheck]) -> int:
        """Count the numbers of the dump that are wrong without a cause, and right in its run."""
        base = self.replay.run(self.cure)
        pairs = zip(self.judge.checks(base), checks, strict=True)
        keys = [(after, key_of(after)) for before, after in pairs if (before.verdict, after.verdict) == (FAIL, PASS)]
        return sum(self.judge.count_moved(check, run.arrays[key], base.arrays[key]) for check, key in keys)

    def fit_hypothesis(self, family: SettingFamily) -> Iterator[Hypothesis]:
        """Yield the hypothesis of a setting with its best value; nothing if the setting has no effect."""
        value = self._fit(family)
        if value is not None and value <= family.largest:
            yield family.hypothesis(value)

    def _run(self, injected: Cure) -> ReplayedRun:
        return self.replay.run(self.cure + injected, until=key_of(self.wrong[0]))

    def _attempt(self, hypotheses: tuple[Hypothesis, ...]) -> Attempt:
        """Measure the share of the error that a cause explains, and the largest remaining error in tolerances."""
        run, old, new, remaining = self._run(tuple(hypothesis.change for hypothesis in hypotheses)), 0.0, 0.0, 0.0
        for check in self.wrong:
            d = self.judge.difference(self.step, check.stage, self.judge.dumped_array(check), run.arrays[key_of(check)])
            old += min(check.isolated.difference.error, 1e9) ** 2  # finite, so that a share can be computed
            new += min(d.error, 1e9) ** 2
            remaining = max(remaining, d.over(check.isolated.tolerance))
        return Attempt(hypotheses, self._stages, 1 - math.sqrt(safe_ratio(new, old)), remaining)

    def _fit(self, family: SettingFamily) -> float | None:
        """Fit the value that is nearest to the dump, by Gauss-Newton steps of its logarithm; None without effect."""
        x = min(family.values, key=lambda value: float(np.linalg.norm(self._residuals(family, value))))
        for _ in range(_MOVES):
            residual = self._residuals(family, x)
            slope = (self._residuals(family, x * math.exp(_NUDGE)) - residual) / _NUDGE
            curvature = float(slope @ slope)
            if not (math.isfinite(curvature) and curvature > 1e-24):  # the setting has no effect
                return None
            move = float(np.clip(-(slope @ residual) / curvature, -_FARTHEST, _FARTHEST))
            x *= math.exp(move)
            if abs(move) < 1e-7:
                break
        return x

    def _residuals(self, family: SettingFamily, value: float) -> np.ndarray:
        """Compute the errors of the quantity, each array divided by its norm in the dump; 0 where not comparable."""
        run, residuals = self._run((family.hypothesis(value).change,)), []
        for check in self.wrong:
            dumped, expected = self.judge.dumped_array(check), run.arrays[key_of(check)]
            actual, expected = (a if dumped.rows is None else a[dumped.rows] for a in (dumped.array, expected))
            residuals.append(np.nan_to_num((expected - actual) / (np.linalg.norm(actual) or 1.0)).ravel())
        return np.concatenate(residuals)


MOST_WORK = 1e9  # base weights times tokens: above it, `could_not_show` injects no mistakes


def changes_of(attempt: Attempt) -> Cure:
    """Return the changes that the hypotheses make."""
    return tuple(hypothesis.change for hypothesis in attempt.hypotheses)


def could_not_show(
    replay: TrainingReplay, judge: TrainingJudge, adapter: Adapter, config: ModelConfig
) -> tuple[dict[str, list[str]], list[str]]:
    """List mistakes that the dump cannot show, by reason; a second list has a note if llorch did not test them all."""
    dump, undetectable = replay.dump, dict[str, list[str]]()
    for mistake in TRAINING:
        if mistake.stages[0] in OUTSIDE:
            undetectable.setdefault(OUTSIDE[mistake.stages[0]], []).append(mistake.name)
        elif mistake.name in RANDOM:
            undetectable.setdefault("llorch cannot repeat the random numbers of dropout", []).append(mistake.name)
        elif not mistake.applies_to(config):
            undetectable.setdefault("this model does not have the part that it changes", []).append(mistake.name)
    n_tokens = sum(int((batch.positions >= 0).sum()) for step in dump.steps for batch in step.batches)
    n_weights = config.n_layers * config.hidden_size * (4 * config.hidden_size + 3 * config.intermediate_size)
    if not may_see_each_other(dump, config):
        reason = "no row of the dump has two documents (document_ids or cu_seqlens declare them)"
        undetectable[reason] = [PACKING[0].name]
    if n_tokens * n_weights > MOST_WORK:
        return undetectable, ["the model is large: llorch did not test which other mistakes this dump cannot show"]
    base, reasons = replay.run(), _words_by_reason(dump, adapter)
    checks, first = judge.checks(base), min(step.number for step in dump.steps if step.batches)

    def shows(mistake: Mistake[Any], until: Key | None) -> bool:
        arrays = replay.run((InjectedMistake(mistake, along=True),), until=until).arrays
        keys = [(check, key) for check in checks if (key := key_of(check)) in arrays]
        return any(judge.distance(check, arrays[key], base.arrays[key]) >= VISIBLE for check, key in keys)

    for mistake in possible_mistakes(config):
        if not (shows(mistake, (first, "loss", "")) or shows(mistake, None)):  # most show in the first loss
            undetectable.setdefault(_reason_not_shown(mistake, dump, reasons), []).append(mistake.name)
    return undetectable, []


def _reason_not_shown(mistake: Mistake[Any], dump: TrainingDump, reasons: Mapping[str, Sequence[str]]) -> str:
    group = group_of(mistake)
    groups = {dumped_group for step in dump.steps for dumped_group, _ in step.shown}
    if not groups & {*FLOW[FLOW.index(group) :]}:
        return f"the dump has no quantity from {group} on"
    matching_reasons = (reason for reason, words in reasons.items() if any(word in mistake.name for word in words))
    return next(matching_reasons, "its effect here is no larger than rounding")


def _words_by_reason(dump: TrainingDump, adapter: Adapter) -> dict[str, Sequence[str]]:
    """Map each reason that holds for the dump to words in the names of the mistakes that it hides."""
    settings, config = dump.settings, adapter.config
    batches = [batch for step in dump.steps for batch in step.batches]
    slots = [step.batches for step in dump.steps if step.batches]
    conditions: dict[str, tuple[bool, Sequence[str]]] = {
        "B is zero, so the adapter adds zero and A has no gradient": (
            not any(array.any() for name, array in adapter.flat().items() if name.endswith(LORA_B)), ("lora",)),
        "rank_pattern is empty": (not config.rank_pattern, ("rank-pattern",)),
        "alpha_pattern is empty": (not config.alpha_pattern, ("alpha-pattern",)),
        "the adapter is not rank-stabilised": (not config.use_rslora, ("rslora",)),
        "a step has one micro-batch": (max(map(len, slots)) < 2, ("accumulation",)),
        "a step has one row": (max(sum(len(batch.ids) for batch in group) for group in slots) < 2, ("mean-of-rows",)),
        "labels are not smoothed": (settings.label_smoothing == 0, ("smoothing",)),
        "every token is learned": (
            all((batch.labels[batch.positions > 0] != IGNORED).all() for batch in batches),
            ("prompt", "ignored", "all-tokens")),
        "gradients are not clipped": (settings.max_grad_norm == math.inf, ("clip",)),
        "weight decay is 0": (settings.weight_decay == 0, ("decay",)),
        "the dump has only the first step": (dump.steps[-1].number == 1, ("step-counted",)),
    }  # fmt: skip
    return {reason: words for reason, (holds, words) in conditions.items() if holds}
