"""Find the first wrong quantity of a LoRA training run, and the mistake that causes it.

A step is a chain of quantities: logits, token losses, the loss, gradients from the last layer to the first, their norm,
clipped gradients, moments, parameters. llorch recomputes each from the dump's inputs. At the first wrong quantity it
injects known mistakes and other values of settings until one reproduces the dump's numbers. It checks the remaining
quantities with that mistake injected, so the next wrong quantity has another cause. An unexplained error matches no
known mistake. Quantities that follow from it are not checked.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from llorch.diagnosis.attempt import Attempt, Hypothesis, near_misses
from llorch.diagnosis.training.advice import PASSES, advise
from llorch.diagnosis.training.hypotheses import AFTER_CLIPPING, list_hypotheses, setting_families, zero_gradients
from llorch.diagnosis.training.judge import TrainingJudge, key_of
from llorch.diagnosis.training.replay import FLOW, TrainingReplay
from llorch.diagnosis.training.score import Cure, Scorer, changes_of, could_not_show
from llorch.diagnosis.training.start import (
    describe_start,
    first_step,
    other_starts,
    start_from_dump,
    starts_from_adapter,
)
from llorch.diagnosis.verdict import Diagnosis, Finding, StageCheck, percent
from llorch.engines.dumps.raw import RawDump
from llorch.engines.dumps.training_dump import TrainingDump, training_dump
from llorch.files import Weights
from llorch.judging.expectations.training_refs import ISOLATED
from llorch.lora.adapter import Adapter
from llorch.ops.numerics import DtypeName
from llorch.stages.comparison import FAIL, PASS, ROUNDING

MOST_FINDINGS = 8
HALF: tuple[DtypeName, ...] = ("bfloat16", "float16")
PARTIAL = 0.1  # smallest explained share of a mistake that may be one of a pair
BACKWARD_STAGES = {  # tensor -> stages that the gradient passes between the later tensors and this one
    "lm_head": "loss, logits", "down_proj": "ffn_out", "up_proj": "ffn_up", "gate_proj": "ffn_act",
    "o_proj": "attn_out", "v_proj": "attn_context", "k_proj": "attn_probs, attn_scores, k_rope",
    "q_proj": "attn_scores, q_rope", "embed_tokens": "embed",
}  # fmt: skip


def diagnose_training(weights: Weights, adapter: Adapter, raw: RawDump, *, model: str = "") -> Diagnosis:
    """Check a training dump and name its mistakes.

    `weights` are those of the base model, in any dtype. `adapter` is the adapter before the first step; if the dump has
    the parameters before that step, they replace it. The checks are in the order of the run, by step and tensor.

    Raises:
        UserError: This is no training dump, it does not fit the adapter, or it contradicts itself.
    """
    dump, float64_weights = training_dump(raw, adapter), weights.astype(np.float64, keep=True)
    dtype = _dtype(dump)
    search = _Search(float64_weights, adapter, dump, dtype, model)
    unknown = {stage_ref for finding in search.findings if finding.kind == "unknown" for stage_ref in finding.places}
    if dtype == "float32" and not dump.dtype and unknown:  # use bfloat16 if it explains all errors
        in_half = _Search(float64_weights, adapter, dump, HALF[0], model)
        half_refs = {(check.n_pass, check.key) for check in in_half.checks}
        search = in_half if unknown <= half_refs and not in_half.findings else search
    return search.diagnosis()


def _dtype(dump: TrainingDump) -> DtypeName:
    """Infer the dtype of activations: the dump's declaration, else the stored dtype of the logits, else float32."""
    logits = [s.stored for step in dump.steps for (group, _), s in step.shown.items() if group == "adapted_logits"]
    half_dtypes: list[DtypeName] = [half for half in HALF if half in (dump.dtype, *logits)]
    return half_dtypes[0] if half_dtypes else "float32"


class _Search:
    """Search for the causes of one dump's errors, with the tolerances of one dtype; it runs on creation."""

    def __init__(self, weights: Weights, adapter: Adapter, dump: TrainingDump, dtype: DtypeName, model: str) -> None:
        self.weights, self.adapter, self.model = weights, adapter, model
        self.dtype: DtypeName = dtype
        self.findings: list[Finding] = []
        self._replay_dump(dump)
        self._find_start(adapter, dump)
        self._run()

    def _replay_dump(self, dump: TrainingDump) -> None:
        """Replay and check `dump` in place of the previous one."""
        self.dump, self.replay = dump, TrainingReplay(self.weights, self.adapter, dump)
        self.checker = self._checker_for(self.dtype)
        self.checks = self.checker.checks(self.replay.run())

    def _find_start(self, given: Adapter, dump: TrainingDump) -> None:
        """Replace `--adapter`, or leave out the first step, if the dump shows that the adapter is of another step."""
        run, number = self.replay.run(), first_step(dump).number
        wrong = {check.n_pass for check in self._pass_checks() if check.verdict == FAIL}
        if number not in wrong or not starts_from_adapter(dump, given, number):
            return
        for adapter, candidate in other_starts(self.weights.config, given, dump, run):
            self.adapter, first = adapter, first_step(candidate).number
            self._replay_dump(candidate)
            verdicts = {check.verdict for check in self._pass_checks() if check.n_pass == first}
            if first in wrong and verdicts == {PASS}:
                note = describe_start(number, first)
                self._replay_dump(replace(candidate, notes=(*dump.notes, note)))
                return
        self.adapter = given
        self._replay_dump(dump)

    def _may_be_start(self, wrong: StageCheck) -> bool:
        """Tell if the adapter may cause an error: its step starts from `--adapter`, and nothing from it is right."""
        checks = (check for check in self._pass_checks() if check.n_pass == wrong.n_pass)
        verdicts = {check.verdict for check in checks if check.isolated.mode != ISOLATED}
        return verdicts == {FAIL} and starts_from_adapter(self.dump, self.adapter, wrong.n_pass)

    def _without_first_step(self, wrong: StageCheck) -> TrainingDump | None:
        """Leave out the first step if `--adapter` may cause its error, and later steps are right."""
        later = {check.verdict for check in self._pass_checks() if check.n_pass > wrong.n_pass}
        return start_from_dump(self.dump, self.adapter) if self._may_be_start(wrong) and later == {PASS} else None

    def _pass_checks(self) -> list[StageCheck]:
        """Select the checks of the forward and backward passes."""
        return [check for check in self.checks if check.stage in PASSES]

    def _checker_for(self, dtype: DtypeName) -> TrainingJudge:
        return TrainingJudge(self.dump, self.weights.config, self.adapter.flat(), dtype, model=self.model)

    def _run(self) -> None:
        """Name the first cause, inject it, check again, and repeat."""
        injected: Cure = ()
        unexplained: dict[str, int] = {}  # group -> run index of its first error
        self.first_checks = self.checks
        while True:
            self.checks = self.checker.checks(self.replay.run(injected))
            wrong_check = _next(self.checks, unexplained)
            if wrong_check is None or len(self.findings) == MOST_FINDINGS:
                break
            group_checks = [check for check in self.checks if _run_index(check) == _run_index(wrong_check)]
            best, near = (None, []) if wrong_check.isolated.difference.fault else self._explain(group_checks, injected)
            is_unknown = best is None and wrong_check.isolated.difference.fault is None
            if is_unknown and not self.findings and (later := self._without_first_step(wrong_check)):
                self._replay_dump(later)
                continue
            advice = "" if best else advise(wrong_check, self.checker, from_adapter=self._may_be_start(wrong_check))
            self.findings.append(_finding(wrong_check, group_checks, self.checks, best, near, advice))
            if best is None:
                unexplained[wrong_check.stage] = _run_index(wrong_check)
            elif AFTER_CLIPPING in best.names:
                self._replay_dump(self.dump.as_clipped())
            else:
                injected += changes_of(best)

    def _explain(self, wrong: Sequence[StageCheck], injected: Cure) -> tuple[Attempt | None, list[Attempt]]:
        """Find the cause that reproduces a wrong quantity of the dump.

        Try known mistakes first, then settings with their best values, then pairs of causes. Also return the causes
        that the dump cannot distinguish from the best one, or near misses if there is no best one.
        """
        scorer, ran_since = Scorer(self.replay, self.checker, wrong, injected), self._ran_since(wrong[0])
        causes = [
            (hypothesis,)
            for hypothesis in list_hypotheses(self.weights.config, self.adapter, self.dump, ran_since, wrong[0].stage)
        ]
        attempts = scorer.best_first(causes)
        best, equals = scorer.choose(attempts)
        if best is None or scorer.n_right(best) < len(self.checks):  # a setting may explain more
            settings = [(hypothesis,) for hypothesis in self._fit_settings(scorer, ran_since)]
            attempts = [*attempts, *scorer.best_first(settings)]
            best, equals = scorer.choose(attempts)
            causes += settings
        if best is None and "gradient" in ran_since and (zero := self._zero_tensors(wrong)):
            attempts += scorer.best_first([(zero_gradients(zero),)])
            best, equals = scorer.choose(attempts)
        if self.checker.dumped_array(wrong[0]).array.size == 1:  # many pairs explain one number, or most of it
            return best, equals
        if best is None:
            attempts.sort(key=lambda attempt: -attempt.explained_share)
            in_part = (attempt for attempt in attempts if attempt.explained_share > PARTIAL and attempt.remaining > 1)
            partial = [attempt.hypotheses[0] for attempt in in_part][:2]
            pairs = [(a, b) for a in partial for (b,) in causes if a.name != b.name]
            best, equals = scorer.choose(scorer.best_first(pairs))
        return best, equals if best else near_misses(attempt for attempt in attempts if attempt.remaining > 1)

    def _zero_tensors(self, checks: Sequence[StageCheck]) -> list[str]:
        """List the tensors of wrong checks whose array in the dump is exactly 0."""
        wrong = (check for check in checks if check.verdict == FAIL)
        return [key_of(check)[2] for check in wrong if not self.checker.dumped_array(check).array.any()]

    def _ran_since(self, wrong: StageCheck) -> set[str]:
        """Collect the quantities computed since the last right one, at most two steps before, and the wrong one."""
        end = _run_index(wrong)
        failed = {_run_index(check) for check in self.checks if check.verdict == FAIL}
        right = {_run_index(check) for check in self.checks} - failed
        first = min(step.number for step in self.dump.steps if step.batches) * len(FLOW)
        last = max((index for index in right if index < end), default=first - 1)
        return {FLOW[index % len(FLOW)] for index in range(max(last + 1, end - 2 * len(FLOW)), end + 1)}

    def _fit_settings(self, scorer: Scorer, ran_since: set[str]) -> Iterator[Hypothesis]:
        """Yield the hypotheses of a changed setting, with the value that fits the wrong quantity best."""
        number, group, _ = until = key_of(scorer.wrong[0])
        run = self.replay.run(scorer.cure, until=until)
        gradients = (array for (n, g, _), array in run.arrays.items() if (n, g) == (number, "gradient"))
        norm = math.sqrt(sum(float(np.square(array).sum()) for array in gradients)) or math.inf
        scale = self.adapter.scaling(next(iter(self.adapter.targets)))
        for family in setting_families(self.dump, scorer.step, scale, norm, ran_since, group):
            yield from scorer.fit_hypothesis(family)

    def diagnosis(self) -> Diagnosis:
        """Collect checks, findings and notes in one diagnosis."""
        free = {key_of(check): check.isolated for check in self.checker.checks(self.replay.run(fed=False), fed=False)}
        failed = {stage_ref for finding in self.findings for stage_ref in finding.places if finding.kind != "rounding"}
        first_checks = {key_of(check): check for check in self.first_checks}  # before mistakes were injected
        float32_checks = self._checker_for("float32").checks(self.replay.run())
        exact = {key_of(check) for check in float32_checks if check.verdict == PASS}  # PASS, not ROUNDING
        checks = []
        for check in self.checks:
            key, is_wrong = key_of(check), (check.n_pass, check.key) in failed
            verdict = PASS if self.dtype == "float32" or key in exact else ROUNDING
            dump_check = replace(first_checks.get(key, check) if is_wrong else check, chained=free[key])
            checks.append(dump_check.with_verdict(FAIL if is_wrong or check.verdict == FAIL else verdict))
        undetectable, notes = could_not_show(self.replay, self.checker, self.adapter, self.weights.config)
        findings = [*self.findings, *_rounding_findings(checks, self.dtype)]
        return Diagnosis(self.model, self.dump.source, checks, findings, undetectable, (*self.dump.notes, *notes))


def _next(checks: Sequence[StageCheck], unexplained: Mapping[str, int]) -> StageCheck | None:
    """Return the first failed check whose group has no unexplained error yet, and which cannot inherit one."""
    first = min(unexplained.values(), default=math.inf)
    failed = (check for check in checks if check.verdict == FAIL and check.stage not in unexplained)
    return next((check for check in failed if check.isolated.mode == ISOLATED or _run_index(check) < first), None)


def _run_index(check: StageCheck) -> int:
    """Return the position of a quantity's group in the run over all steps."""
    return check.n_pass * len(FLOW) + FLOW.index(check.stage)


def _finding(
    wrong_check: StageCheck, group_checks: Sequence[StageCheck], checks: Sequence[StageCheck], best: Attempt | None,
    similar: Sequence[Attempt], advice: str,
) -> Finding:  # fmt: skip
    """Make the finding of a wrong quantity in one step; without a cause (`best`), in all steps.

    `similar` are equally good causes, or near misses if there is no cause; `advice` is for a finding without a cause.
    """
    group_checks = group_checks if best else [check for check in checks if check.stage == wrong_check.stage]
    failed_checks = [check for check in group_checks if check.verdict == FAIL]
    location = f"step {wrong_check.n_pass}, {wrong_check.key}"
    misses = tuple(attempt.causes("near miss")[0] for attempt in similar)
    if best is None:
        starts_in, sentence = _locate(wrong_check, checks, location)
        sentence += advice
        kind = "not finite" if wrong_check.isolated.difference.fault else "unknown"
        return Finding.of(kind, failed_checks, sentence, starts_in, (), misses)
    starts_in = tuple(dict.fromkeys(hypothesis.change.mistake.stages[0] for hypothesis in best.hypotheses))
    sentences = " ".join(hypothesis.sentence for hypothesis in best.hypotheses)
    share = "all" if best.explained_share >= 0.99995 else percent(best.explained_share)
    sentence = f"{location}: {sentences} This explains {share} of the error."
    if misses:
        sentence += f" This dump cannot tell this mistake from {', '.join(cause.name for cause in misses)}."
    return Finding.of(best.finding_kind, failed_checks, sentence, starts_in, best.causes(), misses)


def _locate(wrong: StageCheck, checks: Sequence[StageCheck], location: str) -> tuple[tuple[str, ...], str]:
    """Describe where an unexplained error starts."""
    if fault := wrong.isolated.difference.fault:
        return (wrong.key,), f"{location}: {fault}."
    if wrong.isolated.difference.index == ():
        numbers = f"expected {wrong.isolated.difference.expected:.6g}, got {wrong.isolated.difference.actual:.6g}"
        return (wrong.key,), f"{location}: {numbers}; no known mistake makes this number."
    group_keys = [check.key for check in checks if _run_index(check) == _run_index(wrong)]
    first = group_keys.index(wrong.key)
    prefix = f"; {first} of the {len(group_keys)} quantities before it are right" if first else ""
    target = key_of(wrong)[2].split(".")[-2] if wrong.stage == "gradient" else ""
    stages = BACKWARD_STAGES.get(target, "")
    starts_in = tuple(f"l{wrong.layer}.{name}" for name in stages.split(", ")) if stages else (wrong.key,)
    size = f"error {wrong.over:.3g} times the tolerance of its arithmetic"
    return starts_in, f"{location}: this error matches no known mistake ({size}{prefix})."


def _rounding_findings(checks: Sequence[StageCheck], dtype: DtypeName) -> list[Finding]:
    """Make one finding for all differences that half precision explains; empty if there are none."""
    roundings = [check for check in checks if check.verdict == ROUNDING]
    if not roundings:
        return []
    largest = max(roundings, key=lambda check: check.over)
    sentence = f"{len(roundings)} quantities differ as {dtype} explains, by at most {largest.over:.2g} of its tolerance"
    return [Finding.of("rounding", roundings, sentence, ())]
