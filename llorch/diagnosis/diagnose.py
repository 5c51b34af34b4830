"""Diagnosis: find the hypotheses that explain the errors of a dump, the stages (named arrays) that an engine saved.

Wrong stages are examined in the order of the run. The error may start in any stage that ran since the last dumped ones,
so llorch replays hypotheses about these stages on the engine's numbers. A hypothesis is *named* if the remaining error
is rounding. Its finding covers all later wrong stages that it explains; the first unexplained one starts the next.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from llorch.diagnosis.attempt import Attempt, best_by_name, near_misses
from llorch.diagnosis.dump_checker import DumpChecker, Progress
from llorch.diagnosis.earlier_passes import count_unchecked, has_no_past, reads_past
from llorch.diagnosis.expected import rows
from llorch.diagnosis.joined_findings import join_findings
from llorch.diagnosis.mistakes.variants import VISIBLE
from llorch.diagnosis.replay import Replay
from llorch.diagnosis.search.cause_search import CauseSearch
from llorch.diagnosis.search.file_orders import orders_to_try
from llorch.diagnosis.search.hypotheses import Hypothesis
from llorch.diagnosis.search.norm_places import is_folded, with_gain
from llorch.diagnosis.sentences import describe_causes, describe_passes, describe_pattern, describe_unknown
from llorch.diagnosis.verdict import EARLIER_PASSES, Diagnosis, Finding, Kind, StageCheck
from llorch.engines.dumps.stage_dump import Misread, StageDump
from llorch.files import Weights
from llorch.judging.types import Cause
from llorch.stages.comparison import FAIL, PASS, ROUNDING, measure
from llorch.stages.table import matrix_of

N_MORE_LAYERS = 3  # layers searched after an unexplained stage; all layers not searched count as unexplained too
N_CANDIDATES = 8  # the nearest named attempts; the one that explains most later stages is chosen


def diagnose(
    weights: Weights, dump: StageDump, *, model: str = "", progress: Progress = lambda line: None
) -> Diagnosis:
    """Find the wrong stages of a dump, and their causes; `model` is the model's name in reports.

    `weights` are those that the engine ran; llorch computes in their dtype, float64 for exact numerics.
    """
    checker, checks = check_stages(weights, dump, progress, model)
    dump, search = checker.replay.dump, CauseSearch(checker.replay, checker.pasts)  # the dump may be moved for YaRN
    all_findings = join_findings(list(_findings(checks, search, progress)), checks, checker.replay)
    decided, undecided_refs = _split_undecided(all_findings, checks, checker.replay)
    checks = [check for check in checks if (check.n_pass, check.key) not in undecided_refs]
    progress("looking for mistakes that this dump cannot show")
    undetectable = _could_not_show(checks, search)
    misread = dump.misread
    if misread is not None and not misread.is_rounding and all(finding.kind == "rounding" for finding in decided):
        decided = [_misread(misread), *decided]
    findings = [*decided, *_defect_findings(dump), *_arithmetic(checks)]
    not_run = [*checker.not_run, *undecided_refs]
    by_reason = {**({EARLIER_PASSES: not_run} if not_run else {}), **dump.left_out}
    return Diagnosis(
        model, dump.source, settled(checks, findings), findings, undetectable, dump.notes, by_reason,
        count_unchecked(checker.replay),
    )  # fmt: skip


def _misread(misread: Misread) -> Finding:
    """Make the finding for matrices that the engine read wrongly although no dumped stage shows it."""
    causes = tuple(
        Cause(name, "mistake", sentence, stages=(), explained_share=1.0, remaining=0.0)
        for name, sentence in misread.mistakes.items()
    )
    return Finding(
        "mistake" if causes else "unknown", "weights", n_pass=0, starts_in=("weights",), layers=(), causes=causes,
        near_misses=(), places=(), sentence=f"weights: {misread.sentence}.",
    )  # fmt: skip


def _defect_findings(dump: StageDump) -> Iterator[Finding]:
    """Yield a finding for each defect of a dump, such as logits whose largest value is in the padding."""
    for defect in dump.defects:
        yield Finding(
            "unknown", defect.key, defect.n_pass, starts_in=(defect.key,), layers=(), causes=(), near_misses=(),
            places=((defect.n_pass, defect.key),), sentence=defect.sentence,
        )  # fmt: skip


def _is_misread(check: StageCheck, replay: Replay) -> bool:
    """Tell if a stage, or one since the last dumped ones, multiplies by a matrix that the engine read wrongly."""
    misread = replay.dump.misread
    if misread is None or misread.is_rounding:
        return False
    stages_since = (replay.stages[key] for key in check.ran_since)
    matrices = {(matrix_of(stage, replay.config), layer) for stage, layer in stages_since}
    return any((name if layer is None else f"layers.{layer}.{name}") in misread.names for name, layer in matrices)


def findings(weights: Weights, dump: StageDump) -> Iterator[Finding]:
    """Yield the findings of `diagnose` lazily, except misread weights without a wrong stage.

    The first finding takes a fraction of the time of all.
    """
    checker, checks = check_stages(weights, dump, lambda line: None)
    search = CauseSearch(checker.replay, checker.pasts)
    for finding in _findings(checks, search, lambda line: None):
        yield from _split_undecided([finding], checks, checker.replay)[0]
    yield from _defect_findings(checker.replay.dump)
    yield from _arithmetic(checks)


def check_stages(
    weights: Weights, dump: StageDump, progress: Progress, model: str = ""
) -> tuple[DumpChecker, list[StageCheck]]:
    """Check every stage; if a GGUF file's order, or YaRN's factor in scores, makes some fail, undo it and repeat."""
    checker = DumpChecker(Replay(weights, dump), progress, model=model)
    checks = list(checker.results())
    for order in orders_to_try(checks, dump, weights.config):
        moved_checker = DumpChecker(Replay(weights, order.apply(dump, weights.config)), progress, model=model)
        if order.is_kept(checks, moved_checks := list(moved_checker.results())):
            return moved_checker, moved_checks
    has_failures = any(check.verdict == FAIL for check in checks)
    if has_failures and (moved := with_gain(dump, weights.config)) is not None:
        moved_checker = DumpChecker(Replay(weights, moved), progress, model=model)
        if is_folded(checks, moved_checks := list(moved_checker.results())):
            return moved_checker, moved_checks
    return checker, checks


def _split_undecided(
    dump_findings: Sequence[Finding], checks: Sequence[StageCheck], replay: Replay
) -> tuple[list[Finding], list[tuple[int, str]]]:
    """Separate the decided findings from the stages that unknown earlier tokens may explain.

    If a dump starts after position 0 and has no cache, either its text starts there, or it lacks earlier tokens.
    """
    if replay.dump.n_before is not None or has_no_past(checks, replay):  # the number of earlier tokens is known
        return [*dump_findings], []
    ran_since = {(check.n_pass, check.key): check.ran_since for check in checks}
    unknown = (finding for finding in dump_findings if finding.kind == "unknown")
    undecided = [finding for finding in unknown if reads_past(replay, ran_since[finding.n_pass, finding.key])]
    decided = [finding for finding in dump_findings if finding not in undecided]
    return decided, [stage_ref for finding in undecided for stage_ref in finding.places]


def settled(checks: Sequence[StageCheck], findings: Sequence[Finding]) -> list[StageCheck]:
    """Mark checks beyond their tolerance as ROUNDING if a finding of kind rounding explains them."""
    explained = {stage_ref for finding in findings if finding.kind == "rounding" for stage_ref in finding.places}
    return [check.with_verdict(ROUNDING) if (check.n_pass, check.key) in explained else check for check in checks]


def _findings(checks: Sequence[StageCheck], search: CauseSearch, progress: Progress) -> Iterator[Finding]:
    """Yield one finding for each cause, in the order of the run."""
    wrong_checks = [check for check in checks if check.verdict == FAIL]
    right_checks = [check for check in checks if check.verdict == PASS]
    all_explained = True  # after an unknown error no pairs are searched: its consequences may be anything
    while wrong_checks:
        first, *later_checks = wrong_checks
        progress(f"{first.key}: looking for the mistake")
        was_right = any(c.key == first.key and c.n_pass < first.n_pass for c in right_checks)  # narrows `search.run`
        attempts = search.run(first, pairs=all_explained and not was_right, was_right=was_right)
        explaining = [attempt for attempt in attempts if attempt.is_named]
        consistent = _consistent(first, explaining[:N_CANDIDATES], later_checks, search)
        best, explained = _choose_attempt(consistent, right_checks, search)
        attempts = [attempt for attempt in attempts if not attempt.is_named or any(attempt is a for a, _ in consistent)]
        all_explained = all_explained and best is not None
        failing = _without(later_checks, explained)
        related = _related(first, failing, search, was_right=was_right) if best is None else _with_fault(first, failing)
        explained = [*explained, *related]
        yield _finding(first, best, explained, attempts, checks, search)
        wrong_checks = _without(later_checks, explained)


def _without(checks: Sequence[StageCheck], excluded: Sequence[StageCheck]) -> list[StageCheck]:
    """Return the checks that are not in `excluded`."""
    stage_refs = {(check.n_pass, check.key) for check in excluded}
    return [check for check in checks if (check.n_pass, check.key) not in stage_refs]


def _related(
    first: StageCheck, later_checks: Sequence[StageCheck], search: CauseSearch, *, was_right: bool
) -> Iterator[StageCheck]:
    """Yield checks that share the unexplained cause of `first`.

    If `first` has a fault, yield all checks with a fault. If it is a product with a matrix that the engine read
    wrongly, also yield such products. Else yield checks of its stage, except in layers that a known mistake explains.
    """
    faulty = list(_with_fault(first, later_checks))
    yield from faulty
    if _is_misread(first, search.replay):
        yield from (check for check in _without(later_checks, faulty) if _is_misread(check, search.replay))
        return
    same_stage = [check for check in _without(later_checks, faulty) if check.stage == first.stage]
    searched = [check for check in same_stage if check.n_pass == first.n_pass][:N_MORE_LAYERS]
    attempts = {c.layer: search.run(c, pairs=False, was_right=was_right) for c in searched}
    explained = {layer for layer, layer_attempts in attempts.items() if any(a.is_named for a in layer_attempts)}
    yield from (check for check in same_stage if check.layer not in explained)


def _with_fault(first: StageCheck, later_checks: Sequence[StageCheck]) -> Iterator[StageCheck]:
    """Yield all checks with a fault (arrays that cannot be compared) if `first` has one, else none."""
    if first.isolated.difference.fault is not None:
        yield from (check for check in later_checks if check.isolated.difference.fault is not None)


def _consistent(
    first: StageCheck, explaining: Sequence[Attempt], later: Sequence[StageCheck], search: CauseSearch
) -> list[tuple[Attempt, list[StageCheck]]]:
    """Return the attempts that other passes do not refute, each with the later checks that it explains.

    An attempt is refuted if it explains less than half of the errors of the same stage and layer in other passes.
    """
    candidates = [(attempt, [check for check in later if search.explains(attempt, check)]) for attempt in explaining]
    half = sum(check.key == first.key for check in later) / 2
    return [(a, explained) for a, explained in candidates if sum(c.key == first.key for c in explained) >= half]


def _choose_attempt(
    consistent: Sequence[tuple[Attempt, list[StageCheck]]], right: Sequence[StageCheck], search: CauseSearch
) -> tuple[Attempt | None, list[StageCheck]]:
    """Choose an attempt: prefer one that changes no right stage, then one that explains the most other wrong stages."""

    def rank(attempt: Attempt, explained: Sequence[StageCheck]) -> tuple[bool, int]:
        return not any(_would_spoil(attempt, check, search) for check in right), len(explained)

    return max(consistent, key=lambda pair: rank(*pair), default=(None, []))


def _would_spoil(attempt: Attempt, check: StageCheck, search: CauseSearch) -> bool:
    """Tell if a hypothesis, injected in all passes and layers, would change a right stage visibly.

    Pairs, and hypotheses about earlier passes only, are not tried.
    """
    (hypothesis, *more_hypotheses) = attempt.hypotheses
    if more_hypotheses or attempt.before is not None or not hypothesis.select_keys(check.ran_since):
        return False
    return _shows(hypothesis, check, search.compute(check), search)


def _finding(
    first: StageCheck, best: Attempt | None, explained: Sequence[StageCheck], attempts: Sequence[Attempt],
    checks: Sequence[StageCheck], search: CauseSearch,
) -> Finding:  # fmt: skip
    """Make the finding of the first wrong stage: best attempt, explained stages, near misses, alternatives."""
    causes = _causes(best, attempts) if best is not None else ()
    names = {cause.name for cause in causes}
    single_attempts = [a for a in attempts if len(a.hypotheses) == 1 and a.names.isdisjoint(names)]
    matching = [attempt for attempt in single_attempts if attempt.is_named]
    alternatives = best_by_name(matching) if causes else []
    matching_names = {attempt.names for attempt in matching}
    near = near_misses(attempt for attempt in single_attempts if attempt.names not in matching_names)
    kind: Kind = "not finite" if first.isolated.difference.fault_kind == "non-finite" else "unknown"
    kind, starts_in = (kind, first.ran_since) if best is None else (best.finding_kind, best.stages)
    passes, pattern = describe_passes(first, checks, search.replay), ""
    if causes:
        sentence = describe_causes(causes, starts_in, passes)
    else:
        pattern, is_misread = describe_pattern(first, search), _is_misread(first, search.replay)
        sentence = describe_unknown(first, starts_in, pattern, passes, is_misread=is_misread)
    near_causes = tuple(cause for attempt in near for cause in attempt.causes("near miss"))
    alternative_causes = tuple(cause for attempt in alternatives for cause in attempt.causes())
    return Finding.of(kind, [first, *explained], sentence, starts_in, causes, near_causes, alternative_causes, pattern)


def _causes(best: Attempt, attempts: Sequence[Attempt]) -> tuple[Cause, ...]:
    """Name the causes of the best attempt.

    If it is one mistake without a value, and a setting in the same stages explains the error too, add the setting's
    sentence and value. The setting `scaled` does not count: it is any factor on a stage.
    """
    cause, *more_causes = best.causes()
    if more_causes or cause.value:
        return (cause, *more_causes)
    equals = (a.hypotheses[0] for a in attempts if a.is_named and len(a.hypotheses) == 1 and a.stages == best.stages)
    setting = next((hypothesis for hypothesis in equals if hypothesis.value and hypothesis.name != "scaled"), None)
    if setting is None:
        return (cause,)
    return (replace(cause, sentence=f"{cause.sentence} {setting.sentence}", value=setting.value),)


def _arithmetic(checks: Sequence[StageCheck]) -> Iterator[Finding]:
    """Yield a finding for each arithmetic that explains differences, with the used share of the tolerance."""
    checks_by_arithmetic: dict[str, list[StageCheck]] = defaultdict(list)
    for check in checks:
        if check.verdict == ROUNDING:
            checks_by_arithmetic[check.arithmetic].append(check)
    for arithmetic, explained in checks_by_arithmetic.items():
        worst = max(explained, key=lambda check: check.over)
        sentence = (
            f"{arithmetic}: {len(explained)} stages use at most {worst.over:.2f} of the tolerance for this arithmetic: "
            f"{worst.key} has error {worst.isolated.difference.error:.1e}, "
            f"tolerance {worst.isolated.tolerance.error:.1e}. This is no mistake."
        )
        yield Finding.of("rounding", explained, sentence, (explained[0].key,))


def _could_not_show(checks: Sequence[StageCheck], search: CauseSearch) -> Mapping[str, Sequence[str]]:
    """List the known mistakes that would change no dumped stage visibly, by reason.

    Only one check is tried for each stage, first or later pass, and number of stages since the last dumped ones.
    """
    samples = list({(bool(c.n_pass), c.stage, len(c.ran_since)): c for c in checks}.values())
    right_arrays = {id(check): search.compute(check) for check in samples}
    reasons: dict[str, list[str]] = defaultdict(list)
    first, *later = search.replay.dump.passes
    has_past = bool(later) or search.replay.n_before > 0

    def reason(mistake: Hypothesis) -> str:
        if mistake.after_cached and not has_past:
            return "the dump has one pass, so no stage reads a cache that an earlier pass filled"
        applicable = [c for c in samples if mistake.select_keys(c.ran_since) and (c.n_pass or not mistake.after_cached)]
        if not applicable:
            return "the dump has neither its stage nor a later one"
        if any(_shows(mistake, check, right_arrays[id(check)], search) for check in applicable):
            return ""
        span = f"{len(first.ids)} tokens from position {first.first_position} on"
        return f"the effect is no larger than rounding in {span}"

    # A mistake in decoding weights has several hypotheses, one after another, see `block_hypotheses`.
    for name, hypotheses in groupby(search.mistakes, key=lambda hypothesis: hypothesis.name):
        if all(explanations := [reason(hypothesis) for hypothesis in hypotheses]):
            reasons[explanations[0]].append(name)
    return dict(reasons)


def _shows(mistake: Hypothesis, check: StageCheck, right_array: np.ndarray | None, search: CauseSearch) -> bool:
    """Tell if a mistake changes a stage by more than rounding does, or makes it impossible to compute."""
    wrong_array = search.compute(check, mistake.change(mistake.select_keys(check.ran_since)))
    if wrong_array is None or right_array is None or wrong_array.shape != right_array.shape:
        return True
    stage, _ = search.replay.stages[check.key]
    dumped = search.replay.dump.dumped[check.n_pass, check.key]
    difference = measure(rows(wrong_array, stage, dumped), rows(right_array, stage, dumped), masked=stage.masked)
    return difference.over(check.isolated.tolerance) >= VISIBLE
