"""Diagnosis: which hypotheses make the errors of a dump.

Results that are wrong are taken in the order of the run. The hypotheses of all stages that ran since the dump showed
the last ones are replayed on the engine's own numbers; one is *named* when nothing is left of the error but rounding.
All later results that the same one explains belong to the same finding; what remains is the next.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from llorch.diagnosis.dump_checker import DumpChecker, Progress
from llorch.diagnosis.earlier_passes import has_no_past, reads_past
from llorch.diagnosis.expected import rows
from llorch.diagnosis.mistakes.variants import VISIBLE
from llorch.diagnosis.replay import Replay
from llorch.diagnosis.search.folded_gain import is_folded, with_gain
from llorch.diagnosis.search.hypotheses import Hypothesis
from llorch.diagnosis.search.trials import Trial, Trials
from llorch.diagnosis.verdict import (
    EARLIER_PASSES,
    HONEST,
    RIGHT,
    WRONG,
    Diagnosis,
    Finding,
    Kind,
    StageResult,
    Suspect,
    percent,
)
from llorch.engines.dumps.stage_dump import Misread, StageDump
from llorch.files import Weights
from llorch.stages.comparison import measure
from llorch.stages.table import matrix_of

NEAR_MISS = 0.5  # what explains less of an error is no suspect
N_NEAR_MISSES = 3
ALIKE = 3  # other layers that are looked at before a stage is called unknown in all of them
CANDIDATES = 8  # of the named, whose reach is compared


def diagnose(
    weights: Weights, dump: StageDump, *, model: str = "", progress: Progress = lambda line: None
) -> Diagnosis:
    """Name the wrong stages of a dump, and their causes.

    Args:
        weights: The model that the engine ran, in the dtype to compute in: float64 for exact numerics.
        dump: Stages that the engine showed.
        model: Its name, for reports.
        progress: Told what is being done.

    Returns:
        The diagnosis.
    """
    judge, results = judge_stages(weights, dump, progress)
    dump, trials = judge.replay.dump, Trials(judge.replay, judge.pasts)
    found, left_open = _without_open(list(_findings(results, trials, progress)), results, judge.replay)
    results = [result for result in results if (result.n_pass, result.key) not in left_open]
    progress("looking for mistakes that this dump cannot show")
    hidden = _could_not_show(results, trials)
    misread = dump.misread
    if misread is not None and not misread.is_rounding and all(finding.kind == "honest" for finding in found):
        found = [_misread(misread), *found]
    findings = [*found, *_arithmetic(results)]
    not_run = [*judge.not_run, *left_open]
    by_reason = {EARLIER_PASSES: not_run} if not_run else {}
    return Diagnosis(model, dump.source, settled(results, findings), findings, hidden, dump.notes, by_reason)


def _misread(misread: Misread) -> Finding:
    """Make the finding of matrices that were read wrongly, although the stages of the dump do not show it."""
    suspects = (Suspect(name, sentence, (), 1.0, 0.0) for name, sentence in misread.mistakes.items())
    return Finding(
        kind="mistake" if misread.mistakes else "unknown",
        key="weights",
        n_pass=0,
        starts_in=("weights",),
        layers=(),
        suspects=tuple(suspects),
        near_misses=(),
        places=(),
        sentence=f"weights: {misread.sentence}.",
    )


def _is_misread(result: StageResult, replay: Replay) -> bool:
    """Tell if a result, or what ran since the dump showed a stage, is a product with a matrix that was read wrongly."""
    misread = replay.dump.misread
    if misread is None or misread.is_rounding:
        return False
    places = (replay.stages[key] for key in result.ran_since)
    matrices = {(matrix_of(stage, replay.config), layer) for stage, layer in places}
    return any((name if layer is None else f"layers.{layer}.{name}") in misread.names for name, layer in matrices)


def causes(weights: Weights, dump: StageDump) -> Iterator[Finding]:
    """Yield the findings of `diagnose` alone, each computed when it is asked for: the first takes a fraction of all."""
    judge, results = judge_stages(weights, dump, lambda line: None)
    trials = Trials(judge.replay, judge.pasts)
    for finding in _findings(results, trials, lambda line: None):
        yield from _without_open([finding], results, judge.replay)[0]
    yield from _arithmetic(results)


def judge_stages(weights: Weights, dump: StageDump, progress: Progress) -> tuple[DumpChecker, list[StageResult]]:
    """Judge every stage of a dump, as it is or with YaRN's gain moved if the engine has it in another place."""
    judge = DumpChecker(Replay(weights, dump), progress)
    results = list(judge.results())
    wrong = any(result.verdict == WRONG for result in results)
    if wrong and (other := with_gain(dump, weights.config)) is not None:
        again = DumpChecker(Replay(weights, other), progress)
        if is_folded(results, with_it := list(again.results())):
            return again, with_it
    return judge, results


def _without_open(
    found: Sequence[Finding], results: Sequence[StageResult], replay: Replay
) -> tuple[list[Finding], list[tuple[int, str]]]:
    """Separate the findings that stand from the stages that unknown earlier tokens may explain.

    A dump that starts after position 0 and shows no cache belongs to a text that starts there, or to a part of a text.
    """
    if replay.dump.n_before is not None or has_no_past(results, replay):
        return [*found], []
    ran_since = {(result.n_pass, result.key): result.ran_since for result in results}
    is_open = [
        finding.kind == "unknown" and reads_past(replay, ran_since[finding.n_pass, finding.key]) for finding in found
    ]
    left_open = [place for finding, is_ in zip(found, is_open, strict=True) if is_ for place in finding.places]
    return [finding for finding, is_ in zip(found, is_open, strict=True) if not is_], left_open


def settled(results: Sequence[StageResult], findings: Sequence[Finding]) -> list[StageResult]:
    """Mark results as HONEST if they were beyond their tolerance until an honest difference explained them."""
    explained = {place for finding in findings if finding.kind == "honest" for place in finding.places}
    return [replace(r, verdict=HONEST) if (r.n_pass, r.key) in explained else r for r in results]


def _findings(results: Sequence[StageResult], trials: Trials, progress: Progress) -> Iterator[Finding]:
    """Yield one finding for each cause, the first of the run first."""
    wrong = [result for result in results if result.verdict == WRONG]
    right = [result for result in results if result.verdict == RIGHT]
    all_named = True  # pairs are looked for until something is unknown: what comes of that may be anything
    while wrong:
        first, *rest = wrong
        progress(f"{first.key}: looking for the mistake")
        was_right = any(result.key == first.key and result.n_pass < first.n_pass for result in right)
        tried = trials.of(first, pairs=all_named and not was_right, was_right=was_right)
        named = [trial for trial in tried if trial.named]
        best, explained = _widest(first, named[:CANDIDATES], rest, right, trials)
        all_named = all_named and best is not None
        left = [result for result in rest if result not in explained]
        explained = [
            *explained,
            *(_alike(first, left, trials, was_right=was_right) if best is None else _spoilt(first, left)),
        ]
        yield _finding(first, best, explained, tried, is_misread=_is_misread(first, trials.replay))
        wrong = [result for result in rest if result not in explained]


def _alike(
    first: StageResult, rest: Sequence[StageResult], trials: Trials, *, was_right: bool
) -> Iterator[StageResult]:
    """Yield results that share the unexplained cause of `first`.

    They are unreadable results, if `first` is unreadable too; products with matrices that were read wrongly, if `first`
    is one; else results of the same stage in layers where no known mistake explains this pass.
    """
    spoilt = list(_spoilt(first, rest))
    yield from spoilt
    if _is_misread(first, trials.replay):
        yield from (result for result in rest if result not in spoilt and _is_misread(result, trials.replay))
        return
    here = [result for result in rest if result.stage == first.stage and result not in spoilt]
    looked_at = [result for result in here if result.n_pass == first.n_pass][:ALIKE]
    tried = {r.layer: trials.of(r, pairs=False, was_right=was_right) for r in looked_at}
    known = {layer for layer, found in tried.items() if any(trial.named for trial in found)}
    yield from (result for result in here if result.layer not in known)


def _spoilt(first: StageResult, rest: Sequence[StageResult]) -> Iterator[StageResult]:
    """Yield the unreadable results that were made from an unreadable result; none if `first` is readable."""
    if first.local.fault is not None:
        yield from (result for result in rest if result.local.fault is not None)


def _widest(
    first: StageResult,
    named: Sequence[Trial],
    rest: Sequence[StageResult],
    right: Sequence[StageResult],
    trials: Trials,
) -> tuple[Trial | None, list[StageResult]]:
    """Choose the named trial that spoils no right result and explains the most other wrong results."""
    reach = [[result for result in rest if trials.explains(trial, result)] for trial in named]
    named, reach = _consistent(named, reach, rest, first)
    if not named:
        return None, []
    spoils = [any(_would_spoil(trial, result, trials) for result in right) for trial in named]
    best = max(range(len(named)), key=lambda at: (not spoils[at], len(reach[at]), -at))
    return named[best], reach[best]


def _consistent(
    named: Sequence[Trial], reach: Sequence[list[StageResult]], rest: Sequence[StageResult], first: StageResult
) -> tuple[list[Trial], list[list[StageResult]]]:
    """Drop trials that leave most of the other errors of the same stage and layer unexplained."""
    others = [r for r in rest if r.key == first.key]
    kept = [at for at in range(len(named)) if 2 * sum(r.key == first.key for r in reach[at]) >= len(others)]
    return [named[at] for at in kept], [reach[at] for at in kept]


def _would_spoil(trial: Trial, result: StageResult, trials: Trials) -> bool:
    """Tell if a hypothesis, made in all passes and layers, would show in a result that is right."""
    (hypothesis, *others) = trial.hypotheses
    if others or not hypothesis.at(result.ran_since):
        return False
    return _shows(hypothesis, result, trials.made(result), trials)


def _finding(
    first: StageResult, best: Trial | None, explained: Sequence[StageResult], tried: Sequence[Trial], *,
    is_misread: bool,
) -> Finding:  # fmt: skip
    """Make the finding of the first wrong result: the best trial, what it explains, near misses, alternatives."""
    results = [first, *explained]
    suspects = _suspects_of_trial(best, tried) if best is not None else ()
    taken = {suspect.name for suspect in suspects}
    alone = [trial for trial in tried if len(trial.hypotheses) == 1 and trial.hypotheses[0].name not in taken]
    others = {t.hypotheses[0].name: _suspect(t.hypotheses[0], t) for t in reversed(alone) if t.named and suspects}
    near = {t.hypotheses[0].name: _suspect(t.hypotheses[0], t) for t in alone if t.share >= NEAR_MISS}
    misses = sorted((suspect for name, suspect in near.items() if name not in others), key=lambda each: -each.share)
    kind: Kind = "unknown"
    if best is not None:
        kind = "honest" if all(each.kind == "honest" for each in best.hypotheses) else "mistake"
    elif first.local.fault_kind == "non-finite":
        kind = "not finite"
    return Finding(
        kind=kind,
        key=first.key,
        n_pass=first.n_pass,
        starts_in=best.places if best is not None else first.ran_since,
        layers=tuple(sorted({result.layer for result in results if result.layer is not None})),
        suspects=suspects,
        near_misses=tuple(misses[:N_NEAR_MISSES]),
        places=tuple((result.n_pass, result.key) for result in results),
        sentence=_sentence(
            first,
            kind,
            suspects,
            best.places if best is not None else first.ran_since,
            [t for t in alone if t.named],
            is_misread=is_misread,
        ),
        alternatives=tuple(reversed(others.values())),
    )


def _suspects_of_trial(best: Trial, tried: Sequence[Trial]) -> tuple[Suspect, ...]:
    """Name the suspects of the best trial.

    A single mistake without a value takes the value of a setting that has the same effect in the same places.
    """
    made = [_suspect(hypothesis, best) for hypothesis in best.hypotheses]
    if len(made) == 1 and not made[0].value:
        values = (t.hypotheses[0] for t in tried if t.named and len(t.hypotheses) == 1 and t.places == best.places)
        same = next((each for each in values if each.value and each.name != "scaled"), None)
        if same is not None:
            one = made[0]
            made = [Suspect(one.name, f"{one.sentence} {same.sentence}", one.stages, one.share, one.left, same.value)]
    return tuple(made)


def _suspect(hypothesis: Hypothesis, trial: Trial) -> Suspect:
    return Suspect(
        hypothesis.name, hypothesis.sentence, hypothesis.at(trial.places), trial.share, trial.left, hypothesis.value
    )


def _sentence(
    first: StageResult, kind: Kind, suspects: Sequence[Suspect], starts_in: Sequence[str], here: Sequence[Trial], *,
    is_misread: bool,
) -> str:  # fmt: skip
    """Format a finding as one message for a person."""
    where = starts_in[0] if len(starts_in) == 1 else f"{starts_in[0]} to {starts_in[-1]}"
    if kind == "not finite":
        return f"{first.key}: {first.local.describe()}, although its inputs are finite."
    if kind == "unknown":
        local = f"the error starts in {where}"
        concentrated = _concentrated(first)
        if here:
            name = here[0].hypotheses[0].name
            known = f"{name} explains pass {first.n_pass}, but not the error of this stage in other passes"
        else:
            known = "this error matches no known mistake"
        reader = "; suspect the engine's reader: a matrix has other numbers than the folder" if is_misread else ""
        return f"{first.key}: {known}; {local}{concentrated}{reader}."
    said = " And: ".join(suspect.sentence for suspect in suspects)
    return f"{where}: {said} This explains {percent(suspects[0].share)} of the error."


def _concentrated(result: StageResult) -> str:
    """Describe the one token, head or channel that has nearly all of an error; empty if there is none."""
    if result.profile is None:
        return ""
    axes = {"token": result.profile.tokens, "head": result.profile.heads, "channel": result.profile.channels}
    said = []
    for name, errors in axes.items():
        if errors is None or len(errors) < 2:
            continue
        squares = np.square(np.where(np.isfinite(errors), errors, 0.0))
        if squares.max() > 0.98 * squares.sum() > 0:
            said.append(f"{name} {int(squares.argmax())}")
    return f", and nearly all of the error is in {' and '.join(said)}" if said else ""


def _arithmetic(results: Sequence[StageResult]) -> Iterator[Finding]:
    """Yield an honest finding for each kind of arithmetic that explains differences; it names the used tolerance."""
    kinds: dict[str, list[StageResult]] = defaultdict(list)
    for result in results:
        if result.verdict == HONEST:
            kinds[result.arithmetic].append(result)
    for kind, here in kinds.items():
        most = max(here, key=lambda result: result.over)
        yield Finding(
            kind="honest",
            key=here[0].key,
            n_pass=here[0].n_pass,
            starts_in=(here[0].key,),
            layers=tuple(sorted({result.layer for result in here if result.layer is not None})),
            suspects=(),
            near_misses=(),
            places=tuple((result.n_pass, result.key) for result in here),
            sentence=f"{kind}: {len(here)} stages use at most {most.over:.2f} of the tolerance for this arithmetic: "
            f"{most.key} has error {most.local.error:.1e}, tolerance {most.tolerance.error:.1e}. This is no mistake.",
        )


def _could_not_show(results: Sequence[StageResult], trials: Trials) -> Mapping[str, Sequence[str]]:
    """List the known mistakes that change no stage of the dump by enough, by reason."""
    one_of_each = list({(bool(r.n_pass), r.stage, len(r.ran_since)): r for r in results}.values())
    rights = {id(result): trials.made(result) for result in one_of_each}
    reasons: dict[str, list[str]] = defaultdict(list)
    first, *later = trials.replay.dump.passes
    has_past = bool(later) or trials.replay.n_before > 0

    def reason(mistake: Hypothesis) -> str:
        if mistake.after_cached and not has_past:
            return "the dump has one pass, so no stage reads a cache that an earlier pass filled"
        able = [r for r in one_of_each if mistake.at(r.ran_since) and (r.n_pass or not mistake.after_cached)]
        if not able:
            return "the dump has neither its stage nor a later one"
        if any(_shows(mistake, result, rights[id(result)], trials) for result in able):
            return ""
        span = f"{len(first.ids)} tokens from position {first.first_position} on"
        return f"the effect is no larger than rounding in {span}"

    listed = set[str]()
    for mistake in trials.mistakes:  # some are there more than once, in other matrices
        if mistake.name not in listed and (said := reason(mistake)):
            listed.add(mistake.name)
            reasons[said].append(mistake.name)
    return dict(reasons)


def _shows(mistake: Hypothesis, result: StageResult, right: np.ndarray | None, trials: Trials) -> bool:
    """Tell if a mistake changes a stage by more than rounding does."""
    wrong = trials.made(result, mistake.change(mistake.at(result.ran_since)))
    if wrong is None or right is None or wrong.shape != right.shape:
        return True
    stage, _ = trials.replay.stages[result.key]
    dumped = trials.replay.dump.dumped[result.n_pass, result.key]
    found = measure(rows(wrong, stage, dumped), rows(right, stage, dumped), masked=stage.masked)
    return found.over(result.tolerance) >= VISIBLE
