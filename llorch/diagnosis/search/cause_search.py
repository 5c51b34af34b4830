"""Search the cause of a wrong stage: inject each hypothesis at every possible stage, and measure the remaining error.

The value of a setting is searched between the values of a list, and reported with as few digits as suffice. If no
hypothesis alone explains the error, pairs of those that leave the smallest errors are tried.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from llorch.diagnosis.attempt import NAMED, ORDER, Attempt, Hypothesis, SettingFamily, best_by_name
from llorch.diagnosis.dump_checker import ArrayPair, pair_of
from llorch.diagnosis.earlier_passes import reads_past
from llorch.diagnosis.replay import UNCHANGED, Arrays, Change, Past, Replay, StageChange
from llorch.diagnosis.search.block_hypotheses import block_mistakes
from llorch.diagnosis.search.hypotheses import known_mistakes, rounding_hypotheses, setting_families
from llorch.diagnosis.verdict import StageCheck
from llorch.stages.comparison import Difference, Tolerance, safe_ratio

FEW_LAYERS = 2  # with more layers, a mistake is tried in all stages of one layer, not in one stage of one layer
EQUAL = 0.05  # in tolerances: values whose remaining errors differ by less are equal; the first one is named
PAIRED = 32  # nearest hypotheses of which pairs are tried
NARROW, WITH_SETTINGS = 3, 6  # if at most 3 stages can be wrong, the 6 nearest mistakes are paired with all settings
REFINED = 0.2  # smallest explained share for which a golden section goes on after `_HOPELESS` steps
_HOPELESS, _STEPS = 10, 36  # steps of a golden section: 36 shrink the interval to a 30 millionth
_GOLDEN = (math.sqrt(5) - 1) / 2


class _StageReached(Exception):
    """Raised to end a run at the stage whose array is needed."""


class CauseSearch:
    """Search for causes of the wrong stages of one dump."""

    def __init__(self, replay: Replay, pasts: Sequence[Sequence[Past]]) -> None:
        """List the hypotheses; `pasts` has for each pass the caches before it: as dumped, and with appended rows."""
        self.replay, self._pasts = replay, pasts
        self.mistakes = (*known_mistakes(replay.config), *block_mistakes(replay.weights))
        self._roundings = tuple(rounding_hypotheses(replay.config))
        self._families = setting_families(replay.config)
        self._cached_inputs: tuple[object, Mapping[str, np.ndarray]] = (None, {})
        self._sizes: dict[tuple[int, str], np.ndarray | None] = {}
        self._finite_errors: dict[tuple[int, str], bool] = {}
        self._first_inherited: str | None = None  # stage key of the first error that earlier passes may explain

    def run(self, check: StageCheck, *, pairs: bool = True, was_right: bool = False) -> list[Attempt]:
        """Try every hypothesis about the stages since the last dumped ones; return the attempts, the nearest first.

        If the stage `was_right` in an earlier pass, try mistakes only in all their stages at once, and only settings
        that may show in a later pass first.
        """
        attempts = list(self._singles(check, was_right=was_right))
        if pairs and not any(attempt.is_named for attempt in attempts):
            attempts += self._pairs(check, attempts)
        if not any(attempt.is_named for attempt in attempts) and self._may_inherit(check):
            attempts += self._in_earlier_passes(check)
        return sorted(attempts, key=lambda attempt: attempt.rank)

    def explains(self, attempt: Attempt, check: StageCheck) -> bool:
        """Tell if the attempt's hypotheses explain another check, in the same stages or wherever they apply."""
        if attempt.before is not None:
            is_later = check.n_pass >= attempt.before
            return is_later and self.inject(attempt.hypotheses, attempt.stages, check, before=attempt.before).is_named
        stages = {stage_of(key) for key in attempt.stages}
        same_stages = tuple(key for key in check.ran_since if stage_of(key) in stages)
        is_applicable = all(hypothesis.select_keys(same_stages) for hypothesis in attempt.hypotheses)
        choices = [*([same_stages] if is_applicable else []), *list_choices(attempt.hypotheses, check.ran_since)]
        return any(self.inject(attempt.hypotheses, keys, check).is_named for keys in choices)

    def _singles(self, check: StageCheck, *, was_right: bool) -> Iterator[Attempt]:
        """Try each known mistake, each rounding and each setting alone."""
        for hypothesis in (*self.mistakes, *self._roundings):
            for keys in list_choices((hypothesis,), check.ran_since)[: 1 if was_right else None]:
                attempt = self.inject((hypothesis,), keys, check)
                yield attempt
                if attempt.is_named:
                    break
        families = self._relevant_families(check)
        yield from (self._fit_value(family, check) for family in families if family.later or not was_right)

    def _may_inherit(self, check: StageCheck) -> bool:
        """Tell if the error may come from a cache that an earlier pass filled wrongly; only the first such is tried."""
        if not check.n_pass or self._first_inherited not in (None, check.key):
            return False
        if reads_past(self.replay, check.ran_since):
            self._first_inherited = check.key
        return self._first_inherited is not None

    def _in_earlier_passes(self, check: StageCheck) -> Iterator[Attempt]:
        """Try each known mistake in the passes before the check's pass only, in all their stages up to the check's."""
        part = self.replay.part_of(check.key)
        stage_keys = [key for key in self.replay.stages if self.replay.part_of(key) <= part]
        for hypothesis in self.mistakes:
            if not hypothesis.after_cached and (keys := hypothesis.select_keys(stage_keys)):
                yield self.inject((hypothesis,), keys, check, before=check.n_pass)

    def _relevant_families(self, check: StageCheck) -> Iterator[SettingFamily]:
        """Yield the settings that the stages since the last dumped ones read."""
        ran_since = {stage_of(key) for key in check.ran_since}
        return (family for family in self._families if not ran_since.isdisjoint(family.stages))

    def _pairs(self, check: StageCheck, singles: Sequence[Attempt]) -> Iterator[Attempt]:
        """Try pairs of the best single hypotheses, and mistakes together with settings."""
        nearest = best_by_name(sorted(singles, key=lambda attempt: attempt.remaining))[:PAIRED]
        for a, b in combinations(nearest, 2):
            first, second = sorted((*a.hypotheses, *b.hypotheses), key=lambda hypothesis: ORDER[hypothesis.kind])
            if second.kind != "mistake" or not set(a.stages) & set(b.stages):  # one mistake at most replaces a stage
                yield self.inject((first, second), tuple(dict.fromkeys((*a.stages, *b.stages))), check)
        if len(check.ran_since) <= NARROW:
            mistakes = [attempt for attempt in nearest if attempt.hypotheses[0].kind == "mistake"][:WITH_SETTINGS]
            for family in self._relevant_families(check):
                for setting in map(family.hypothesis, family.values):
                    for mistake in mistakes:
                        keys = tuple(dict.fromkeys((*mistake.stages, *setting.select_keys(check.ran_since))))
                        yield self.inject((*mistake.hypotheses, setting), keys, check)

    def _fit_value(self, family: SettingFamily, check: StageCheck) -> Attempt:
        """Try a setting with each value of its list and with values between them; return the best attempt."""

        def try_value(value: float, keys: tuple[str, ...]) -> Attempt:
            return self.inject((family.hypothesis(value),), keys, check)

        choices = list_choices((family.hypothesis(family.values[0]),), check.ran_since)
        if len({self.replay.stages[key][1] for key in check.ran_since} - {None}) > 1:
            choices = choices[:1]  # all layers share the setting
        attempts = {(value, keys): try_value(value, keys) for value in family.values for keys in choices}
        best, keys = min(attempts, key=lambda choice: attempts[choice].remaining)
        if (least := attempts[best, keys].remaining) <= 1:
            best, keys = next(choice for choice in attempts if attempts[choice].remaining <= least + EQUAL)
        if not family.refined or best <= 0 or attempts[best, keys].remaining <= 1:  # the search needs a logarithm
            return attempts[best, keys]
        return _refined(best, [value for value in family.values if value > 0], lambda value: try_value(value, keys))

    def inject(
        self, hypotheses: tuple[Hypothesis, ...], keys: tuple[str, ...], check: StageCheck, *, before: int | None = None
    ) -> Attempt:
        """Inject hypotheses at some stages, with the cache that leaves the smallest error.

        With `before`, inject them in the passes before that one only. No rounding explains values that are not finite,
        and a mistake does only if it explains an error of the finite values, too.
        """
        none = Attempt(hypotheses, keys, 0.0, math.inf, before)
        if check.isolated.difference.fault_kind == "non-finite":
            if all(hypothesis.rounds for hypothesis in hypotheses) or not self._has_finite_error(check):
                return none
        change, attempts = together([h.change(h.select_keys(keys)) for h in hypotheses]), []
        dumped = self.replay.dump.dumped[check.n_pass, check.key]
        for past in self._pasts[check.n_pass][: 1 + (check.n_pass > 0)]:  # all caches are equal before the first pass
            array = self.compute(check, change, past, before=before)
            if array is None:
                continue
            pair = pair_of(self.replay, dumped, check.key, array)
            if not pair.has_numbers:
                continue
            pair = pair.where_finite()
            difference = pair.difference
            # The error is infinite if shapes or masks differ; an attempt with the engine's mask explains all of it.
            error = check.isolated.difference.error
            share = 1 - safe_ratio(difference.error, error) if math.isfinite(difference.error) else 0.0
            if difference.fault is None:
                remaining = self._remaining(check, difference, pair)
                attempts.append(Attempt(hypotheses, keys, max(share, 0.0), remaining, before))
        return min(attempts, key=lambda attempt: attempt.remaining, default=none)

    def _has_finite_error(self, check: StageCheck) -> bool:
        """Tell if the finite values of an array that also has others are wrong beyond their tolerance."""
        array_key = check.n_pass, check.key
        if array_key not in self._finite_errors:
            right = self.compute(check)
            pair = right is not None and pair_of(self.replay, self.replay.dump.dumped[array_key], check.key, right)
            self._finite_errors[array_key] = bool(pair) and not pair.finite_part.within(check.isolated.tolerance)
        return self._finite_errors[array_key]

    def _remaining(self, check: StageCheck, difference: Difference, pair: ArrayPair) -> float:
        """Return the remaining error of an attempt, as a multiple of the tolerance of the right numbers.

        If the tolerances per token have another shape, use the tolerance of the whole array. In a wrong row near zero,
        a small rounding error looks large: divide by the norm of the right row if the error then is at most `NAMED`.
        """
        tolerance, sizes = check.isolated.tolerance, pair.sizes
        shape = difference.tokens.shape if difference.tokens is not None else None
        if isinstance(tolerance.tokens, np.ndarray) and shape not in (None, tolerance.tokens.shape):
            tolerance = Tolerance(tolerance.error, tolerance.worst)
        remaining = difference.over(tolerance)
        if remaining <= NAMED or tolerance.tokens is None or sizes is None:
            return remaining
        right_sizes = self._right_sizes(check)
        if right_sizes is None or right_sizes.shape != sizes.shape:
            return remaining
        scale = np.divide(right_sizes, sizes, out=np.ones_like(sizes), where=sizes > 0)
        scaled = difference.over(Tolerance(tolerance.error, tolerance.worst, tolerance.tokens * np.maximum(scale, 1)))
        return scaled if scaled <= NAMED else remaining

    def _right_sizes(self, check: StageCheck) -> np.ndarray | None:
        array_key = check.n_pass, check.key
        if array_key not in self._sizes:
            right = self.compute(check)
            dumped = self.replay.dump.dumped[array_key]
            self._sizes[array_key] = None if right is None else pair_of(self.replay, dumped, check.key, right).sizes
        return self._sizes[array_key]

    def compute(
        self, check: StageCheck, change: Change = UNCHANGED, past: Past | None = None, *, before: int | None = None
    ) -> np.ndarray | None:
        """Compute the stage of a check with a change injected; None if the change yields no array.

        With `before`, the change is injected in the passes before that one only.
        """
        part, past = self.replay.part_of(check.key), past or self._pasts[check.n_pass][0]
        arrays: list[np.ndarray] = []
        key = check.key

        def observe(name: str, array: np.ndarray) -> None:
            if name == key:
                arrays.append(array)
                raise _StageReached

        with np.errstate(all="ignore"):
            try:
                here = change if before is None else UNCHANGED
                first, x = self._begin(check, here, past)
                changed_past = self._change_past(past, check.n_pass, change, first, part, before=before)
                self.replay.run(check.n_pass, observe, changed_past, here, first=first, last=part, x=x)
            except _StageReached:
                return arrays[0]
            except (ValueError, KeyError, IndexError, TypeError, AssertionError):
                return None  # a shape that later stages reject, or two settings that exclude each other
        return None

    def run_part(self, check: StageCheck) -> tuple[Arrays, Arrays]:
        """Run the part of the model that has the stage of a check; return its arrays, and those that are passed on.

        An array is passed on as the engine dumped it, or as llorch computed it.
        """
        part, computed = self.replay.part_of(check.key), dict[str, np.ndarray]()
        first = self.replay.first_part(check.n_pass, part)
        past = self._pasts[check.n_pass][0].copied()
        with np.errstate(all="ignore"):
            passed = self.replay.run(check.n_pass, computed.__setitem__, past, first=first, last=part)
        return computed, passed

    def _begin(self, check: StageCheck, change: Change, past: Past) -> tuple[int, np.ndarray | None]:
        """Find the first part (embedding, layer, logits) that a change concerns, and its input.

        The input is None if it is token ids, or if the dump has it.
        """
        part = self.replay.part_of(check.key)
        first = self.replay.first_part(check.n_pass, part)
        keys = {*change.replaced_stages, *change.passed_on} & {*check.ran_since}
        if first == part or change.setting is not UNCHANGED.setting or not keys:
            return first, None
        first_changed = min(map(self.replay.part_of, keys))
        if first_changed == first:
            return first, None
        return first_changed, self._part_inputs(check.n_pass, first, past)[self.replay.input_of(first_changed)]

    def _part_inputs(self, n_pass: int, first: int, past: Past) -> Mapping[str, np.ndarray]:
        """Compute the inputs of the parts after `first` without a change, up to the first dumped input."""
        if self._cached_inputs[0] != (n_pass, first, past):
            part_inputs: dict[str, np.ndarray] = {}
            part = first + 1
            while part <= self.replay.config.n_layers and self.replay.fed(n_pass, self.replay.input_of(part)) is None:
                part += 1
            inputs = {self.replay.input_of(later_part) for later_part in range(first + 1, part)}

            def observe(name: str, array: np.ndarray) -> None:
                if name in inputs:
                    part_inputs[name] = array

            copy = past.copied()
            self.replay.run(n_pass, observe, copy, first=first, last=min(part - 1, self.replay.config.n_layers))
            self._cached_inputs = (n_pass, first, past), part_inputs
        return self._cached_inputs[1]

    def _change_past(
        self, past: Past, n_pass: int, change: Change, first: int, last: int, *, before: int | None
    ) -> Past:
        """Compute the caches before a pass with the change injected in the earlier passes, or in those `before` one."""
        layers = range(max(first, 0), min(last, self.replay.config.n_layers - 1) + 1)
        if not n_pass or not layers:
            return past
        past = past.empty()
        for earlier in range(n_pass):
            begin = self.replay.first_part(earlier, layers[0])
            there = change if before is None or earlier < before else UNCHANGED
            self.replay.run(earlier, lambda name, array: None, past, there, first=begin, last=layers[-1])
            past = past.next()
        return past


def stage_of(stage_key: str) -> str:
    """Return the stage of a stage key."""
    return stage_key.rpartition(".")[2]


def list_choices(hypotheses: tuple[Hypothesis, ...], ran_since: tuple[str, ...]) -> list[tuple[str, ...]]:
    """List the stage keys to try for hypotheses; each choice is a tuple of keys.

    They are all keys that apply, one stage in all layers, and all stages of one layer (one stage with `FEW_LAYERS`).
    """
    everywhere = tuple(dict.fromkeys(key for h in hypotheses for key in h.select_keys(ran_since)))
    if not everywhere or not all(h.select_keys(ran_since) for h in hypotheses):
        return []
    choices = [everywhere]
    if len(hypotheses) == 1 and hypotheses[0].by_place:
        layers = {key: key.rpartition(".")[0] for key in everywhere}
        choices += [tuple(k for k in everywhere if stage_of(k) == stage) for stage in map(stage_of, everywhere)]
        if len({*layers.values()}) > FEW_LAYERS:
            choices += [tuple(k for k in everywhere if layers[k] == layer) for layer in layers.values()]
        else:
            choices += [(key,) for key in everywhere]
    return list(dict.fromkeys(choices))


def together(changes: Sequence[Change]) -> Change:
    """Combine several changes; a later change acts on the arrays and settings of the earlier ones."""
    merged, *later_changes = changes
    for change in later_changes:
        merged = Change(
            {
                key: _combine_changes(merged.replaced_stages, change.replaced_stages, key)
                for key in {*merged.replaced_stages, *change.replaced_stages}
            },
            {**merged.passed_on, **change.passed_on},
            lambda setting, first=merged.setting, second=change.setting: second(first(setting)),
        )
    return merged


def _combine_changes(first: Mapping[str, StageChange], second: Mapping[str, StageChange], key: str) -> StageChange:
    """Combine the changes of one stage; if both mappings have one, the second changes the array of the first."""
    if key not in first or key not in second:
        return first[key] if key in first else second[key]
    inner, outer = first[key], second[key]
    return StageChange(
        lambda inputs, stage, array: outer.wrong(inputs, stage, inner.wrong(inputs, stage, array)),
        (*inner.reads, *outer.reads),
    )


def _refined(start: float, values: Sequence[float], try_value: Callable[[float], Attempt]) -> Attempt:
    """Search the best value near `start`, by golden section of its logarithm, with as few digits as suffice.

    The interval ends at the neighbours of `start` in `values`, or at a factor of 8 where there is none. A rounded value
    suffices if its error is in the tolerance, or at most 5 % larger than the best.
    """
    low = math.log(max((value for value in values if value < start), default=start / 8))
    high = math.log(min((value for value in values if value > start), default=start * 8))
    lower, upper = (try_value(math.exp(x)) for x in (high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)))
    for n_steps in range(_STEPS):
        if lower.remaining < upper.remaining:
            high, upper = low + _GOLDEN * (high - low), lower
            lower = try_value(math.exp(high - _GOLDEN * (high - low)))
        else:
            low, lower = high - _GOLDEN * (high - low), upper
            upper = try_value(math.exp(low + _GOLDEN * (high - low)))
        if n_steps == _HOPELESS and max(lower.explained_share, upper.explained_share) < REFINED:
            break
    best = min(lower, upper, key=lambda attempt: attempt.remaining)
    shorter = (try_value(float(f"{math.exp((low + high) / 2):.{digits}g}")) for digits in range(1, 7) if best.is_named)
    return next((attempt for attempt in shorter if attempt.remaining <= max(1.0, 1.05 * best.remaining)), best)
