"""Diagnosis: which hypotheses make the errors of a dump.

Results that are wrong are taken in the order of the run. The hypotheses of all stages that ran since the dump showed
the last ones are replayed on the engine's own numbers; one is *named* when nothing is left of the error but rounding.
All later results that the same one explains belong to the same finding; what remains is the next.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from llorch.diagnosis.attempt import NEAR_MISS, Attempt
from llorch.diagnosis.dump_checker import DumpChecker, Progress
from llorch.diagnosis.earlier_passes import has_no_past, reads_past
from llorch.diagnosis.expected import rows
from llorch.diagnosis.mistakes.variants import VISIBLE
from llorch.diagnosis.replay import Replay
from llorch.diagnosis.search.cause_search import CauseSearch
from llorch.diagnosis.search.hypotheses import Hypothesis
from llorch.diagnosis.search.norm_places import is_folded, with_gain
from llorch.diagnosis.verdict import EARLIER_PASSES, Diagnosis, Finding, Kind, StageCheck, percent
from llorch.engines.dumps.stage_dump import Misread, StageDump
from llorch.files import Weights
from llorch.judging.types import Cause
from llorch.stages.comparison import FAIL, PASS, ROUNDING, measure
from llorch.stages.table import matrix_of

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
    judge, results = judge_stages(weights, dump, progress, model)
    dump, search = judge.replay.dump, CauseSearch(judge.replay, judge.pasts)
    found, left_open = _without_open(list(_findings(results, search, progress)), results, judge.replay)
    results = [result for result in results if (result.n_pass, result.key) not in left_open]
    progress("looking for mistakes that this dump cannot show")
    hidden = _could_not_show(results, search)
    misread = dump.misread
    if misread is not None and not misread.is_rounding and all(finding.kind == "rounding" for finding in found):
        found = [_misread(misread), *found]
    findings = [*found, *_arithmetic(results)]
    not_run = [*judge.not_run, *left_open]
    by_reason = {EARLIER_PASSES: not_run} if not_run else {}
    return Diagnosis(model, dump.source, settled(results, findings), findings, hidden, dump.notes, by_reason)


def _misread(misread: Misread) -> Finding:
    """Make the finding of matrices that were read wrongly, although the stages of the dump do not show it."""
    causes = (Cause(name, "mistake", sentence, (), 1.0, 0.0) for name, sentence in misread.mistakes.items())
    kind = "mistake" if misread.mistakes else "unknown"
    return Finding(kind, "weights", 0, ("weights",), (), tuple(causes), (), (), f"weights: {misread.sentence}.")


def _is_misread(result: StageCheck, replay: Replay) -> bool:
    """Tell if a result, or what ran since the dump showed a stage, is a product with a matrix that was read wrongly."""
    misread = replay.dump.misread
    if misread is None or misread.is_rounding:
        return False
    places = (replay.stages[key] for key in result.ran_since)
    matrices = {(matrix_of(stage, replay.config), layer) for stage, layer in places}
    return any((name if layer is None else f"layers.{layer}.{name}") in misread.names for name, layer in matrices)


def findings(weights: Weights, dump: StageDump) -> Iterator[Finding]:
    """Yield the findings of `diagnose` alone, each computed when it is asked for: the first takes a fraction of all."""
    judge, results = judge_stages(weights, dump, lambda line: None)
    search = CauseSearch(judge.replay, judge.pasts)
    for finding in _findings(results, search, lambda line: None):
        yield from _without_open([finding], results, judge.replay)[0]
    yield from _arithmetic(results)


def judge_stages(
    weights: Weights, dump: StageDump, progress: Progress, model: str = ""
) -> tuple[DumpChecker, list[StageCheck]]:
    """Judge every stage of a dump, as it is or with YaRN's gain moved if the engine has it in another place."""
    judge = DumpChecker(Replay(weights, dump), progress, model=model)
    results = list(judge.results())
    wrong = any(result.verdict == FAIL for result in results)
    if wrong and (other := with_gain(dump, weights.config)) is not None:
        again = DumpChecker(Replay(weights, other), progress, model=model)
        if is_folded(results, with_it := list(again.results())):
            return again, with_it
    return judge, results


def _without_open(
    found: Sequence[Finding], results: Sequence[StageCheck], replay: Replay
) -> tuple[list[Finding], list[tuple[int, str]]]:
    """Separate the findings that stand from the stages that unknown earlier tokens may explain.

    A dump that starts after position 0 and shows no cache belongs to a text that starts there, or to a part of a text.
    """
    if replay.dump.n_before is not None or has_no_past(results, replay):
        return [*found], []
    ran_since = {(result.n_pass, result.key): result.ran_since for result in results}
    unknown = (finding for finding in found if finding.kind == "unknown")
    left_open = [finding for finding in unknown if reads_past(replay, ran_since[finding.n_pass, finding.key])]
    standing = [finding for finding in found if finding not in left_open]
    return standing, [place for finding in left_open for place in finding.places]


def settled(results: Sequence[StageCheck], findings: Sequence[Finding]) -> list[StageCheck]:
    """Mark results as ROUNDING if they were beyond their tolerance until a rounding explained them."""
    explained = {place for finding in findings if finding.kind == "rounding" for place in finding.places}
    return [r.with_verdict(ROUNDING) if (r.n_pass, r.key) in explained else r for r in results]


def _findings(results: Sequence[StageCheck], search: CauseSearch, progress: Progress) -> Iterator[Finding]:
    """Yield one finding for each cause, the first of the run first."""
    wrong = [result for result in results if result.verdict == FAIL]
    right = [result for result in results if result.verdict == PASS]
    all_named = True  # pairs are looked for until something is unknown: what comes of that may be anything
    while wrong:
        first, *rest = wrong
        progress(f"{first.key}: looking for the mistake")
        was_right = any(result.key == first.key and result.n_pass < first.n_pass for result in right)
        attempts = search.of(first, pairs=all_named and not was_right, was_right=was_right)
        named = [attempt for attempt in attempts if attempt.is_named]
        best, explained = _widest(first, named[:CANDIDATES], rest, right, search)
        all_named = all_named and best is not None
        left = _without(rest, explained)
        alike = _alike(first, left, search, was_right=was_right) if best is None else _spoilt(first, left)
        explained = [*explained, *alike]
        yield _finding(first, best, explained, attempts, is_misread=_is_misread(first, search.replay))
        wrong = _without(rest, explained)


def _without(results: Sequence[StageCheck], others: Sequence[StageCheck]) -> list[StageCheck]:
    """Return the results that are not among others."""
    places = {(result.n_pass, result.key) for result in others}
    return [result for result in results if (result.n_pass, result.key) not in places]


def _alike(
    first: StageCheck, rest: Sequence[StageCheck], search: CauseSearch, *, was_right: bool
) -> Iterator[StageCheck]:
    """Yield results that share the unexplained cause of `first`.

    They are unreadable results, if `first` is unreadable too; products with matrices that were read wrongly, if `first`
    is one; else results of the same stage in layers where no known mistake explains this pass.
    """
    spoilt = list(_spoilt(first, rest))
    yield from spoilt
    if _is_misread(first, search.replay):
        yield from (result for result in _without(rest, spoilt) if _is_misread(result, search.replay))
        return
    here = [result for result in _without(rest, spoilt) if result.stage == first.stage]
    looked_at = [result for result in here if result.n_pass == first.n_pass][:ALIKE]
    tried = {r.layer: search.of(r, pairs=False, was_right=was_right) for r in looked_at}
    known = {layer for layer, found in tried.items() if any(attempt.is_named for attempt in found)}
    yield from (result for result in here if result.layer not in known)


def _spoilt(first: StageCheck, rest: Sequence[StageCheck]) -> Iterator[StageCheck]:
    """Yield the unreadable results that were made from an unreadable result; none if `first` is readable."""
    if first.isolated.difference.fault is not None:
        yield from (result for result in rest if result.isolated.difference.fault is not None)


def _widest(
    first: StageCheck, named: Sequence[Attempt], rest: Sequence[StageCheck], right: Sequence[StageCheck],
    search: CauseSearch,
) -> tuple[Attempt | None, list[StageCheck]]:  # fmt: skip
    """Choose the named attempt that spoils no right result and explains the most other wrong results.

    Attempts that leave most of the other errors of the same stage and layer unexplained are dropped.
    """
    reach = [(attempt, [result for result in rest if search.explains(attempt, result)]) for attempt in named]
    half = sum(result.key == first.key for result in rest) / 2
    consistent = [(a, explained) for a, explained in reach if sum(r.key == first.key for r in explained) >= half]

    def rank(attempt: Attempt, explained: Sequence[StageCheck]) -> tuple[bool, int]:
        return not any(_would_spoil(attempt, result, search) for result in right), len(explained)

    return max(consistent, key=lambda pair: rank(*pair), default=(None, []))


def _would_spoil(attempt: Attempt, result: StageCheck, search: CauseSearch) -> bool:
    """Tell if a hypothesis, made in all passes and layers, would show in a result that is right."""
    (hypothesis, *others) = attempt.hypotheses
    if others or not hypothesis.at(result.ran_since):
        return False
    return _shows(hypothesis, result, search.made(result), search)


def _finding(
    first: StageCheck, best: Attempt | None, explained: Sequence[StageCheck], attempts: Sequence[Attempt], *,
    is_misread: bool,
) -> Finding:  # fmt: skip
    """Make the finding of the first wrong result: the best attempt, what it explains, near misses, alternatives."""
    causes = _causes(best, attempts) if best is not None else ()
    names = {cause.name for cause in causes}
    alone = [a for a in attempts if len(a.hypotheses) == 1 and a.names.isdisjoint(names)]
    named = [attempt for attempt in alone if attempt.is_named]
    alternatives = {cause.name: cause for a in reversed(named) for cause in a.causes() if causes}
    near = {c.name: c for a in alone if a.explained_share >= NEAR_MISS for c in a.causes("near miss")}
    misses = [cause for name, cause in near.items() if name not in alternatives]
    kind: Kind = "not finite" if first.isolated.difference.fault_kind == "non-finite" else "unknown"
    kind, starts_in = (kind, first.ran_since) if best is None else (best.finding_kind, best.stages)
    return Finding.of(
        kind, [first, *explained], _sentence(first, kind, causes, starts_in, named, is_misread=is_misread), starts_in,
        causes, tuple(sorted(misses, key=lambda cause: -cause.explained_share)[:N_NEAR_MISSES]),
        tuple(reversed(alternatives.values())),
    )  # fmt: skip


def _causes(best: Attempt, attempts: Sequence[Attempt]) -> tuple[Cause, ...]:
    """Name the causes of the best attempt.

    A single mistake without a value takes the value of a setting that has the same effect in the same places.
    """
    cause, *others = best.causes()
    if others or cause.value:
        return (cause, *others)
    alike = (a.hypotheses[0] for a in attempts if a.is_named and len(a.hypotheses) == 1 and a.stages == best.stages)
    setting = next((hypothesis for hypothesis in alike if hypothesis.value and hypothesis.name != "scaled"), None)
    if setting is None:
        return (cause,)
    return (replace(cause, sentence=f"{cause.sentence} {setting.sentence}", value=setting.value),)


def _sentence(
    first: StageCheck, kind: Kind, causes: Sequence[Cause], starts_in: Sequence[str], here: Sequence[Attempt], *,
    is_misread: bool,
) -> str:  # fmt: skip
    """Format a finding as one message for a person."""
    where = starts_in[0] if len(starts_in) == 1 else f"{starts_in[0]} to {starts_in[-1]}"
    if kind == "not finite":
        return f"{first.key}: {first.isolated.difference.describe()}, although its inputs are finite."
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
    said = " And: ".join(cause.sentence for cause in causes)
    return f"{where}: {said} This explains {percent(causes[0].explained_share)} of the error."


def _concentrated(result: StageCheck) -> str:
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


def _arithmetic(results: Sequence[StageCheck]) -> Iterator[Finding]:
    """Yield a finding for each kind of arithmetic that explains differences; it names the used tolerance."""
    kinds: dict[str, list[StageCheck]] = defaultdict(list)
    for result in results:
        if result.verdict == ROUNDING:
            kinds[result.arithmetic].append(result)
    for kind, here in kinds.items():
        most = max(here, key=lambda result: result.over)
        sentence = (
            f"{kind}: {len(here)} stages use at most {most.over:.2f} of the tolerance for this arithmetic: {most.key} "
            f"has error {most.isolated.difference.error:.1e}, tolerance {most.isolated.tolerance.error:.1e}. "
            "This is no mistake."
        )
        yield Finding.of("rounding", here, sentence, (here[0].key,))


def _could_not_show(results: Sequence[StageCheck], search: CauseSearch) -> Mapping[str, Sequence[str]]:
    """List the known mistakes that change no stage of the dump by enough, by reason."""
    one_of_each = list({(bool(r.n_pass), r.stage, len(r.ran_since)): r for r in results}.values())
    rights = {id(result): search.made(result) for result in one_of_each}
    reasons: dict[str, list[str]] = defaultdict(list)
    first, *later = search.replay.dump.passes
    has_past = bool(later) or search.replay.n_before > 0

    def reason(mistake: Hypothesis) -> str:
        if mistake.after_cached and not has_past:
            return "the dump has one pass, so no stage reads a cache that an earlier pass filled"
        able = [r for r in one_of_each if mistake.at(r.ran_since) and (r.n_pass or not mistake.after_cached)]
        if not able:
            return "the dump has neither its stage nor a later one"
        if any(_shows(mistake, result, rights[id(result)], search) for result in able):
            return ""
        span = f"{len(first.ids)} tokens from position {first.first_position} on"
        return f"the effect is no larger than rounding in {span}"

    listed = set[str]()
    for mistake in search.mistakes:  # some are there more than once, in other matrices
        if mistake.name not in listed and (said := reason(mistake)):
            listed.add(mistake.name)
            reasons[said].append(mistake.name)
    return dict(reasons)


def _shows(mistake: Hypothesis, result: StageCheck, right: np.ndarray | None, search: CauseSearch) -> bool:
    """Tell if a mistake changes a stage by more than rounding does."""
    wrong = search.made(result, mistake.change(mistake.at(result.ran_since)))
    if wrong is None or right is None or wrong.shape != right.shape:
        return True
    stage, _ = search.replay.stages[result.key]
    dumped = search.replay.dump.dumped[result.n_pass, result.key]
    found = measure(rows(wrong, stage, dumped), rows(right, stage, dumped), masked=stage.masked)
    return found.over(result.isolated.tolerance) >= VISIBLE
