"""Score of a mistake, or of a number moved until it fits: the share of a training dump's error that it explains.

`could_not_show` injects the known mistakes, and lists those that leave the dumped arrays unchanged.

Numbers are fitted by Gauss's steps. The golden section of `search.cause_search` stays within 8 times a listed value, so
it would miss the factor 1024 of the case `scaler-left-on`. In turn, most settings of the forward pass have no slope.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from llorch.diagnosis.attempt import NEAR_MISS, Attempt, Hypothesis, SettingFamily
from llorch.diagnosis.mistakes import TRAINING, Mistake
from llorch.diagnosis.mistakes.variants import VISIBLE
from llorch.diagnosis.training.hypotheses import (
    OUTSIDE,
    RANDOM,
    group_of,
    possible,
)
from llorch.diagnosis.training.judge import TrainingJudge, key_of
from llorch.diagnosis.training.replay import FLOW, InjectedMistake, Key, ReplayedRun, TrainingReplay
from llorch.diagnosis.verdict import StageCheck
from llorch.engines.dumps.training_dump import TrainingDump
from llorch.families.config import ModelConfig
from llorch.lora.adapter import LORA_B, Adapter
from llorch.stages.comparison import FAIL, PASS, times_over
from llorch.training.batch import IGNORED

_MOVES, _NUDGE, _FARTHEST = 12, 1e-4, 3.0  # of a logarithm that is looked for

Cure = tuple[InjectedMistake, ...]


class Scorer:
    """Scores for one wrong quantity, `wrong`, with what was named before planted already."""

    def __init__(self, replay: TrainingReplay, judge: TrainingJudge, wrong: Sequence[StageCheck], cure: Cure) -> None:
        """Prepare."""
        self.replay, self.judge, self.wrong, self.cure = replay, judge, wrong, cure
        self.step = judge.steps[wrong[0].n_pass]
        self._stages = tuple(check.key for check in wrong if check.verdict == FAIL)

    def best_first(self, causes: Iterable[tuple[Hypothesis, ...]]) -> list[Attempt]:
        """Keep the causes that explain some of the error; causes that explain all of it come first."""
        attempts = (self._attempt(cause) for cause in causes)
        explaining = (attempt for attempt in attempts if attempt.explained_share > 0)
        return sorted(explaining, key=lambda attempt: (attempt.remaining > 1, -round(attempt.explained_share, 6)))

    def chosen(self, attempts: Sequence[Attempt]) -> tuple[Attempt | None, list[Attempt]]:
        """Choose the cause that explains all of the error and makes most of the dump right; also return its equals."""
        explain = [attempt for attempt in attempts if attempt.remaining <= 1 and attempt.explained_share >= NEAR_MISS]
        counts = [self.n_right(attempt) for attempt in explain]
        if max(counts, default=-1) < 0:
            return None, []
        best, *others = [attempt for attempt, count in zip(explain, counts, strict=True) if count == max(counts)]
        alike = {attempt.names: attempt for attempt in others if attempt.names.isdisjoint(best.names)}
        return best, list(alike.values())[:3]

    def n_right(self, attempt: Attempt) -> int:
        """Count the arrays of the whole dump that are right with a cause; -1 if its number fits this step alone."""
        checks, first = self.judge.checks(self.replay.run(self.cure + changes_of(attempt))), self.wrong[0]
        later = (check for check in checks if check.n_pass > first.n_pass and check.stage == first.stage)
        has_number = any(hypothesis.kind == "setting" for hypothesis in attempt.hypotheses)
        if has_number and any(check.verdict == FAIL for check in later):
            return -1
        return sum(check.verdict == PASS for check in checks)

    def fitted(self, family: SettingFamily) -> Iterator[Hypothesis]:
        """Yield a setting with the value that fits best; nothing if the setting has no effect."""
        value = self._fit(family)
        if value is not None and value <= family.most:
            yield family.hypothesis(value)

    def _run(self, injected: Cure) -> ReplayedRun:
        return self.replay.run(self.cure + injected, until=key_of(self.wrong[0]))

    def _attempt(self, hypotheses: tuple[Hypothesis, ...]) -> Attempt:
        """Return the share of the error that a cause explains and the largest error left, in tolerances."""
        run, before, after, left = self._run(tuple(hypothesis.change for hypothesis in hypotheses)), 0.0, 0.0, 0.0
        for check in self.wrong:
            now = self.judge.difference(self.step, check.stage, self.judge.shown(check), run.arrays[key_of(check)])
            before += min(check.isolated.difference.error, 1e9) ** 2
            after += min(now.error, 1e9) ** 2
            left = max(left, now.over(check.isolated.tolerance))
        return Attempt(hypotheses, self._stages, 1 - math.sqrt(times_over(after, before)), left)

    def _fit(self, family: SettingFamily) -> float | None:
        """Fit the number with the least distance to the dump, by Gauss's steps of its logarithm; None: no effect."""
        x = min(family.values, key=lambda value: float(np.linalg.norm(self._off(family, value))))
        for _ in range(_MOVES):
            here = self._off(family, x)
            slope = (self._off(family, x * math.exp(_NUDGE)) - here) / _NUDGE
            steep = float(slope @ slope)
            if not (math.isfinite(steep) and steep > 1e-24):
                return None
            move = float(np.clip(-(slope @ here) / steep, -_FARTHEST, _FARTHEST))
            x *= math.exp(move)
            if abs(move) < 1e-7:
                break
        return x

    def _off(self, family: SettingFamily, value: float) -> np.ndarray:
        """Compute the errors of the quantity, each array divided by its norm in the dump; 0 if nothing is compared."""
        run, off = self._run((family.hypothesis(value).change,)), []
        for check in self.wrong:
            shown, expected = self.judge.shown(check), run.arrays[key_of(check)]
            actual, expected = (a if shown.rows is None else a[shown.rows] for a in (shown.array, expected))
            off.append(np.nan_to_num((expected - actual) / (np.linalg.norm(actual) or 1.0)).ravel())
        return np.concatenate(off)


MOST_WORK = 1e9  # numbers of the base times tokens of the dump, from which on nothing is planted to see


def changes_of(attempt: Attempt) -> Cure:
    """Return the changes that the hypotheses make."""
    return tuple(hypothesis.change for hypothesis in attempt.hypotheses)


def could_not_show(
    replay: TrainingReplay, judge: TrainingJudge, adapter: Adapter, config: ModelConfig
) -> tuple[dict[str, list[str]], list[str]]:
    """List mistakes that the dump cannot show, by reason, with a note if this was not tried."""
    dump, hidden = replay.dump, dict[str, list[str]]()
    for mistake in TRAINING:
        if mistake.stages[0] in OUTSIDE:
            hidden.setdefault(OUTSIDE[mistake.stages[0]], []).append(mistake.name)
        elif mistake.name in RANDOM:
            hidden.setdefault("llorch cannot repeat the random numbers of dropout", []).append(mistake.name)
        elif not mistake.applies_to(config):
            hidden.setdefault("this model does not have the part that it changes", []).append(mistake.name)
    n_tokens = sum(int((batch.positions >= 0).sum()) for step in dump.steps for batch in step.batches)
    n_weights = config.n_layers * config.hidden_size * (4 * config.hidden_size + 3 * config.intermediate_size)
    if n_tokens * n_weights > MOST_WORK:
        return hidden, ["the model is large: llorch did not test which other mistakes this dump cannot show"]
    base, reasons = replay.run(), _parts_by_reason(dump, adapter)
    checks, first = judge.checks(base), min(step.number for step in dump.steps if step.batches)

    def shows(mistake: Mistake[Any], until: Key | None) -> bool:
        made = replay.run((InjectedMistake(mistake, along=True),), until=until).arrays
        keys = [(check, key) for check in checks if (key := key_of(check)) in made]
        return any(judge.apart(check, made[key], base.arrays[key]) >= VISIBLE for check, key in keys)

    for mistake in possible(config):
        if not (shows(mistake, (first, "loss", "")) or shows(mistake, None)):  # most show in the first step
            hidden.setdefault(_reason_not_shown(mistake, dump, reasons), []).append(mistake.name)
    return hidden, []


def _reason_not_shown(mistake: Mistake[Any], dump: TrainingDump, reasons: Mapping[str, Sequence[str]]) -> str:
    group = group_of(mistake)
    shown = {of for step in dump.steps for of, _ in step.shown}
    if not shown & {*FLOW[FLOW.index(group) :]}:
        return f"the dump has no quantity from {group} on"
    told = (reason for reason, parts in reasons.items() if any(part in mistake.name for part in parts))
    return next(told, "its effect here is no larger than rounding")


def _parts_by_reason(dump: TrainingDump, adapter: Adapter) -> dict[str, Sequence[str]]:
    """Map each reason why a dump cannot show something to parts of the names of the mistakes."""
    settings, config = dump.settings, adapter.config
    batches = [batch for step in dump.steps for batch in step.batches]
    slots = [step.batches for step in dump.steps if step.batches]
    held: dict[str, tuple[bool, Sequence[str]]] = {
        "B is zero, so the adapter adds zero and A has no gradient": (
            not any(array.any() for name, array in adapter.flat().items() if name.endswith(LORA_B)), ("lora",)),
        "rank_pattern is empty": (not config.rank_pattern, ("rank-pattern",)),
        "alpha_pattern is empty": (not config.alpha_pattern, ("alpha-pattern",)),
        "the adapter is not rank-stabilised": (not config.use_rslora, ("rslora",)),
        "a step has one micro-batch": (max(map(len, slots)) < 2, ("accumulation",)),
        "a step has one row": (max(sum(len(batch.ids) for batch in own) for own in slots) < 2, ("mean-of-rows",)),
        "labels are not smoothed": (settings.label_smoothing == 0, ("smoothing",)),
        "every token is learned": (
            all((batch.labels[batch.positions > 0] != IGNORED).all() for batch in batches),
            ("prompt", "ignored", "all-tokens")),
        "gradients are not clipped": (settings.max_grad_norm == math.inf, ("clip",)),
        "weight decay is 0": (settings.weight_decay == 0, ("decay",)),
        "the dump has only the first step": (dump.steps[-1].number == 1, ("step-counted",)),
    }  # fmt: skip
    return {reason: parts for reason, (holds, parts) in held.items() if holds}
