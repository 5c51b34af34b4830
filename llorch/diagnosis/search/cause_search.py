"""Hypotheses tried on a wrong result: each is injected where it can have been made, and the remaining error measured.

The value of a setting is searched between the values of a list, and reported with the digits that matter. If no single
hypothesis explains the whole error, pairs of the nearest are tried.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from llorch.diagnosis.attempt import NAMED, ORDER, Attempt, Hypothesis, SettingFamily
from llorch.diagnosis.dump_checker import ArrayPair, pair_of
from llorch.diagnosis.replay import UNCHANGED, Change, Past, Replay, StageChange
from llorch.diagnosis.search.block_hypotheses import block_mistakes
from llorch.diagnosis.search.hypotheses import known_mistakes, rounding_hypotheses, setting_families
from llorch.diagnosis.verdict import StageCheck
from llorch.stages.comparison import Difference, Tolerance, times_over

FEW_LAYERS = 2  # up to so many a mistake may have been made in one place of one layer
EQUAL = 0.05  # of a limit: values that leave so little more are one, and the first of the list is named
PAIRED = 32  # of the nearest hypotheses, where pairs are tried
NARROW, WITH_SETTINGS = 3, 6  # stages since the last ones, up to which mistakes are tried with every value; how many
REFINED = 0.2  # a value is looked for only as long as some explains so much
_HOPELESS, _STEPS = 10, 36  # of a golden section: 36 of them leave a 30 millionth of where it began
_GOLDEN = (math.sqrt(5) - 1) / 2


class _Seen(Exception):
    """A run went as far as it had to."""


class CauseSearch:
    """Attempts to explain the wrong results of one dump."""

    def __init__(self, replay: Replay, pasts: Sequence[Sequence[Past]]) -> None:
        """Prepare; `pasts` are the caches before each pass, in each way in which the engine may keep them."""
        self.replay, self._pasts = replay, pasts
        self.mistakes = (*known_mistakes(replay.config), *block_mistakes(replay.weights))
        self._roundings = tuple(rounding_hypotheses(replay.config))
        self._families = setting_families(replay.config)
        self._entered: tuple[object, Mapping[str, np.ndarray]] = (None, {})
        self._sizes: dict[tuple[int, str], np.ndarray | None] = {}

    def of(self, result: StageCheck, *, pairs: bool = True, was_right: bool = False) -> list[Attempt]:
        """Try every hypothesis that can be made since the dump showed the last stages; the nearest first.

        If the same stage `was_right` in an earlier pass, skip hypotheses that would have shown there.
        """
        attempts = list(self._singles(result, was_right=was_right))
        if pairs and not any(attempt.is_named for attempt in attempts):
            attempts += self._pairs(result, attempts)
        return sorted(attempts, key=lambda attempt: attempt.rank)

    def explains(self, attempt: Attempt, result: StageCheck) -> bool:
        """Tell if the attempt's hypotheses explain another result, in the same stages or wherever they can be made."""
        stages = {stage_of(place) for place in attempt.stages}
        same = tuple(place for place in result.ran_since if stage_of(place) in stages)
        able = all(each.at(same) for each in attempt.hypotheses)
        tried = [*([same] if able else []), *choices(attempt.hypotheses, result.ran_since)]
        return any(self.tried(attempt.hypotheses, places, result).is_named for places in tried)

    def _singles(self, result: StageCheck, *, was_right: bool) -> Iterator[Attempt]:
        """Try each known mistake, each rounding and each setting alone."""
        for hypothesis in (*self.mistakes, *self._roundings):
            for places in choices((hypothesis,), result.ran_since)[: 1 if was_right else None]:
                attempt = self.tried((hypothesis,), places, result)
                yield attempt
                if attempt.is_named:
                    break
        families = self._families_read(result)
        yield from (self._valued(family, result) for family in families if family.later or not was_right)

    def _families_read(self, result: StageCheck) -> Iterator[SettingFamily]:
        """Yield the settings that a stage reads which ran since the dump showed the last stages."""
        ran_since = {stage_of(place) for place in result.ran_since}
        return (family for family in self._families if not ran_since.isdisjoint(family.stages))

    def _pairs(self, result: StageCheck, singles: Sequence[Attempt]) -> Iterator[Attempt]:
        """Try pairs of the best single hypotheses, and mistakes together with settings."""
        best: dict[str, Attempt] = {}
        for attempt in sorted(singles, key=lambda attempt: attempt.remaining):
            best.setdefault(attempt.hypotheses[0].name, attempt)
        nearest = list(best.values())[:PAIRED]
        for one, other in combinations(nearest, 2):
            first, second = sorted((*one.hypotheses, *other.hypotheses), key=lambda each: ORDER[each.kind])
            if second.kind != "mistake" or not set(one.stages) & set(other.stages):  # two mistakes make one stage once
                yield self.tried((first, second), tuple(dict.fromkeys((*one.stages, *other.stages))), result)
        if len(result.ran_since) <= NARROW:
            mistakes = [attempt for attempt in nearest if attempt.hypotheses[0].kind == "mistake"][:WITH_SETTINGS]
            for family in self._families_read(result):
                for setting in map(family.hypothesis, family.values):
                    for mistake in mistakes:
                        places = tuple(dict.fromkeys((*mistake.stages, *setting.at(result.ran_since))))
                        yield self.tried((*mistake.hypotheses, setting), places, result)

    def _valued(self, family: SettingFamily, result: StageCheck) -> Attempt:
        """Try a setting with each value of its list, and between them; return the best attempt."""

        def tried(value: float, places: tuple[str, ...]) -> Attempt:
            return self.tried((family.hypothesis(value),), places, result)

        where = choices((family.hypothesis(family.values[0]),), result.ran_since)
        if len({self.replay.stages[place][1] for place in result.ran_since} - {None}) > 1:
            where = where[:1]  # a setting is that of all layers
        attempts = {(value, places): tried(value, places) for value in family.values for places in where}
        best, places = min(attempts, key=lambda at: attempts[at].remaining)
        if (least := attempts[best, places].remaining) <= 1:
            best, places = next(at for at in attempts if attempts[at].remaining <= least + EQUAL)
        if not family.refined or best <= 0 or attempts[best, places].remaining <= 1:
            return attempts[best, places]
        return _refined(best, [value for value in family.values if value > 0], lambda value: tried(value, places))

    def tried(self, hypotheses: tuple[Hypothesis, ...], places: tuple[str, ...], result: StageCheck) -> Attempt:
        """Try hypotheses at some places, with the cache that leaves the least error."""
        change, attempts = together([each.change(each.at(places)) for each in hypotheses]), []
        dumped = self.replay.dump.dumped[result.n_pass, result.key]
        for past in self._pasts[result.n_pass][: 1 + (result.n_pass > 0)]:  # the first pass has none
            made = self.made(result, change, past)
            if made is None:
                continue
            here = pair_of(self.replay, dumped, result.key, made)
            if not here.has_numbers:
                continue
            here = here.where_finite()
            found = here.difference
            # infinite where shape or mask is another: to have that one is to explain it
            before = result.isolated.difference.error
            share = 1 - times_over(found.error, before) if math.isfinite(found.error) else 0.0  # all zero beside none
            if found.fault is None:
                attempts.append(Attempt(hypotheses, places, max(share, 0.0), self._remaining(result, found, here)))
        return min(attempts, key=lambda attempt: attempt.remaining, default=Attempt(hypotheses, places, 0.0, math.inf))

    def _remaining(self, result: StageCheck, found: Difference, here: ArrayPair) -> float:
        """Return the error that a attempt leaves, as a multiple of the tolerance of the right numbers.

        If the tolerances per token have another shape, use the tolerance of the whole array. In a wrong row near zero,
        a small rounding error looks large: measure the error against the size of the right row if that makes it small
        enough for a name, at most `NAMED`.
        """
        tolerance, sizes = result.isolated.tolerance, here.sizes
        shape = found.tokens.shape if found.tokens is not None else None
        if isinstance(tolerance.tokens, np.ndarray) and shape not in (None, tolerance.tokens.shape):
            tolerance = Tolerance(tolerance.error, tolerance.worst)
        left = found.over(tolerance)
        if left <= NAMED or tolerance.tokens is None or sizes is None:
            return left
        right = self._right_sizes(result)
        if right is None or right.shape != sizes.shape:
            return left
        larger = np.divide(right, sizes, out=np.ones_like(sizes), where=sizes > 0)
        beside_right = found.over(Tolerance(tolerance.error, tolerance.worst, tolerance.tokens * np.maximum(larger, 1)))
        return beside_right if beside_right <= NAMED else left

    def _right_sizes(self, result: StageCheck) -> np.ndarray | None:
        at = result.n_pass, result.key
        if at not in self._sizes:
            right = self.made(result)
            dumped = self.replay.dump.dumped[at]
            self._sizes[at] = None if right is None else pair_of(self.replay, dumped, result.key, right).sizes
        return self._sizes[at]

    def made(self, result: StageCheck, change: Change = UNCHANGED, past: Past | None = None) -> np.ndarray | None:
        """Compute the stage of a result with a change injected; None if the change yields no array."""
        part, past = self.replay.part_of(result.key), past or self._pasts[result.n_pass][0]
        found: list[np.ndarray] = []
        key = result.key

        def observe(name: str, array: np.ndarray) -> None:
            if name == key:
                found.append(array)
                raise _Seen

        with np.errstate(all="ignore"):
            try:
                first, x = self._begin(result, change, past)
                changed = self._changed(past, result.n_pass, change, first, part)
                self.replay.run(result.n_pass, observe, changed, change, first=first, last=part, x=x)
            except _Seen:
                return found[0]
            except (ValueError, KeyError, IndexError, TypeError, AssertionError):
                return None  # of a shape that the next stages do not take; of a setting that the other one takes away
        return None

    def _begin(self, result: StageCheck, change: Change, past: Past) -> tuple[int, np.ndarray | None]:
        """Find the first part that a change concerns, and its input; None if the dump shows it or if it is ids."""
        part = self.replay.part_of(result.key)
        first = self.replay.first_part(result.n_pass, part)
        places = {*change.plants, *change.passed_on} & {*result.ran_since}
        if first == part or change.setting is not UNCHANGED.setting or not places:
            return first, None
        concerned = min(map(self.replay.part_of, places))
        if concerned == first:
            return first, None
        return concerned, self._inputs_of(result.n_pass, first, past)[self.replay.input_of(concerned)]

    def _inputs_of(self, n_pass: int, first: int, past: Past) -> Mapping[str, np.ndarray]:
        """Compute the inputs of the parts after `first` without a change, up to the first that the dump shows."""
        if self._entered[0] != (n_pass, first, past):
            made: dict[str, np.ndarray] = {}
            part = first + 1
            while part <= self.replay.config.n_layers and self.replay.fed(n_pass, self.replay.input_of(part)) is None:
                part += 1
            inputs = {self.replay.input_of(each) for each in range(first + 1, part)}

            def observe(name: str, array: np.ndarray) -> None:
                if name in inputs:
                    made[name] = array

            copy = past.again()
            self.replay.run(n_pass, observe, copy, first=first, last=min(part - 1, self.replay.config.n_layers))
            self._entered = (n_pass, first, past), made
        return self._entered[1]

    def _changed(self, past: Past, n_pass: int, change: Change, first: int, last: int) -> Past:
        """Compute the caches before a pass as if the change had been made in the earlier passes too."""
        layers = range(max(first, 0), min(last, self.replay.config.n_layers - 1) + 1)
        if not n_pass or not layers:
            return past
        past = past.empty()
        for earlier in range(n_pass):
            begin = self.replay.first_part(earlier, layers[0])
            self.replay.run(earlier, lambda name, array: None, past, change, first=begin, last=layers[-1])
            past = past.next()
        return past


def stage_of(place: str) -> str:
    """Return the stage of a stage key."""
    return place.rpartition(".")[2]


def choices(hypotheses: tuple[Hypothesis, ...], ran_since: tuple[str, ...]) -> list[tuple[str, ...]]:
    """List where hypotheses may have been made: wherever they can be, in one stage of all layers, or in one place."""
    everywhere = tuple(dict.fromkeys(place for each in hypotheses for place in each.at(ran_since)))
    if not everywhere or not all(each.at(ran_since) for each in hypotheses):
        return []
    found = [everywhere]
    if len(hypotheses) == 1 and hypotheses[0].by_place:
        layers = {place: place.rpartition(".")[0] for place in everywhere}
        found += [tuple(p for p in everywhere if stage_of(p) == stage) for stage in map(stage_of, everywhere)]
        if len({*layers.values()}) > FEW_LAYERS:
            found += [tuple(p for p in everywhere if layers[p] == layer) for layer in layers.values()]
        else:
            found += [(place,) for place in everywhere]
    return list(dict.fromkeys(found))


def together(changes: Sequence[Change]) -> Change:
    """Combine several changes; later ones act on the results of earlier ones."""
    made, *others = changes
    for other in others:
        made = Change(
            {place: _combine_changes(made.plants, other.plants, place) for place in {*made.plants, *other.plants}},
            {**made.passed_on, **other.passed_on},
            lambda setting, one=made.setting, two=other.setting: two(one(setting)),
        )
    return made


def _combine_changes(first: Mapping[str, StageChange], second: Mapping[str, StageChange], place: str) -> StageChange:
    """Combine the changes at one place; if both have one, the second changes the result of the first."""
    if place not in first or place not in second:
        return first[place] if place in first else second[place]
    one, two = first[place], second[place]
    return StageChange(
        lambda inputs, stage, array: two.wrong(inputs, stage, one.wrong(inputs, stage, array)), (*one.reads, *two.reads)
    )


def _refined(start: float, values: Sequence[float], tried: Callable[[float], Attempt]) -> Attempt:
    """Search the best value near `start`, by golden section of its logarithm, with as few digits as suffice."""
    low = math.log(max((value for value in values if value < start), default=start / 8))
    high = math.log(min((value for value in values if value > start), default=start * 8))
    one, two = (tried(math.exp(x)) for x in (high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)))
    for n_steps in range(_STEPS):
        if one.remaining < two.remaining:
            high, two = low + _GOLDEN * (high - low), one
            one = tried(math.exp(high - _GOLDEN * (high - low)))
        else:
            low, one = high - _GOLDEN * (high - low), two
            two = tried(math.exp(low + _GOLDEN * (high - low)))
        if n_steps == _HOPELESS and max(one.explained_share, two.explained_share) < REFINED:
            break
    best = min(one, two, key=lambda attempt: attempt.remaining)
    shorter = (tried(float(f"{math.exp((low + high) / 2):.{digits}g}")) for digits in range(1, 7) if best.is_named)
    return next((attempt for attempt in shorter if attempt.remaining <= max(1.0, 1.05 * best.remaining)), best)
