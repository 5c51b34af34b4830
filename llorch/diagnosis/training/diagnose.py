"""The first wrong quantity of anybody's LoRA training, and the mistake that makes it.

A step is a chain: logits, losses, the loss, gradients from the last layer to the first, clipping, moments, parameters.
Each is computed again from the dump's inputs. At the first wrong quantity, known mistakes are injected into llorch's
step, and numbers moved, until one of them gives the dump's numbers. The rest is judged with that mistake in the code,
so the next wrong quantity has another cause. An unexplained error matches no known mistake. Quantities that follow from
it are not judged.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from llorch.diagnosis.attempt import NEAR_MISS, Attempt, Hypothesis
from llorch.diagnosis.training.hypotheses import AFTER_CLIPPING, known, setting_families
from llorch.diagnosis.training.judge import TrainingJudge, key_of
from llorch.diagnosis.training.replay import FLOW, TrainingReplay
from llorch.diagnosis.training.score import Cure, Scorer, changes_of, could_not_show
from llorch.diagnosis.verdict import Diagnosis, Finding, StageCheck
from llorch.engines.dumps.raw import RawDump
from llorch.engines.dumps.training_dump import TrainingDump, training_dump
from llorch.files import Weights
from llorch.judging.expectations.training_places import ISOLATED
from llorch.lora.adapter import Adapter
from llorch.ops.numerics import DtypeName
from llorch.stages.comparison import FAIL, PASS, ROUNDING

MOST_FINDINGS = 8
HALF: tuple[DtypeName, ...] = ("bfloat16", "float16")
PARTIAL = 0.1  # share of the error from which on a mistake may be one of a pair
BEHIND = {  # tensor -> what the gradient comes through just before it, where those of later tensors are right
    "lm_head": "loss, logits", "down_proj": "ffn_out", "up_proj": "ffn_up", "gate_proj": "ffn_act",
    "o_proj": "attn_out", "v_proj": "attn_context", "k_proj": "attn_probs, attn_scores, k_rope",
    "q_proj": "attn_scores, q_rope", "embed_tokens": "embed",
}  # fmt: skip


def diagnose_training(weights: Weights, adapter: Adapter, raw: RawDump, *, model: str = "") -> Diagnosis:
    """Judge a training dump and name its mistakes.

    Args:
        weights: Weights of the base model, in any type.
        adapter: Start of the dump's first step; if the dump has the parameters before, these are used instead.
        raw: The dump, see `dumps.training_dump`.
        model: The model's name.

    Returns:
        Results by step and tensor, in the order in which they are made; findings, the first cause first.

    Raises:
        ValueError: The dump is none of training, or fits neither the adapter nor itself.
    """
    dump, wide = training_dump(raw, adapter), weights.astype(np.float64, keep=True)
    dtype = _dtype(dump)
    found = _Search(wide, adapter, dump, dtype, model)
    unknown = {place for finding in found.findings if finding.kind == "unknown" for place in finding.places}
    if dtype == "float32" and not dump.dtype and unknown:
        in_half = _Search(wide, adapter, dump, HALF[0], model)
        half_places = {(check.n_pass, check.key) for check in in_half.checks}
        found = in_half if unknown <= half_places and not in_half.findings else found
    return found.diagnosis()


def _dtype(dump: TrainingDump) -> DtypeName:
    """Infer the dtype of activations: the dump's declaration, else the stored dtype of the logits, else float32."""
    logits = [s.stored for step in dump.steps for (group, _), s in step.shown.items() if group == "adapted_logits"]
    found: list[DtypeName] = [half for half in HALF if half in (dump.dtype, *logits)]
    return found[0] if found else "float32"


class _Search:
    """The findings of one dump in one arithmetic."""

    def __init__(self, weights: Weights, adapter: Adapter, dump: TrainingDump, dtype: DtypeName, model: str) -> None:
        self.weights, self.adapter, self.model = weights, adapter, model
        self.dtype: DtypeName = dtype
        self.findings: list[Finding] = []
        self._take(dump)
        self._run()

    def _take(self, dump: TrainingDump) -> None:
        """Replay and judge this dump from now on."""
        self.dump, self.replay = dump, TrainingReplay(self.weights, self.adapter, dump)
        self.judge = self._judge_in(self.dtype)

    def _judge_in(self, dtype: DtypeName) -> TrainingJudge:
        return TrainingJudge(self.dump, self.weights.config, self.adapter.flat(), dtype, model=self.model)

    def _run(self) -> None:
        """Name the first cause, judge the rest with it in the code, and so on."""
        cure: Cure = ()
        closed: dict[str, int] = {}  # quantities that nothing explains: where they are wrong first
        self.first = self.judge.checks(self.replay.run())
        while True:
            self.checks = self.judge.checks(self.replay.run(cure))
            wrong = _next(self.checks, closed)
            if wrong is None or len(self.findings) == MOST_FINDINGS:
                break
            of_group = [check for check in self.checks if _run_index(check) == _run_index(wrong)]
            best, near = (None, []) if wrong.isolated.difference.fault else self._explained(of_group, cure)
            self.findings.append(_finding(wrong, of_group, self.checks, best, near))
            if best is None:
                closed[wrong.stage] = _run_index(wrong)
            elif AFTER_CLIPPING in best.names:
                self._take(self.dump.as_clipped())
            else:
                cure += changes_of(best)

    def _explained(self, wrong: Sequence[StageCheck], cure: Cure) -> tuple[Attempt | None, list[Attempt]]:
        """Find the cause that makes a wrong quantity as the dump shows it.

        Try known mistakes first, then numbers as they fit best, then two causes at once. Also return the causes that
        cannot be told from the best one; if there is no best one, return the causes that come near.
        """
        scorer, ran_since = Scorer(self.replay, self.judge, wrong, cure), self._since(wrong[0])
        tried = [(one,) for one in known(self.weights.config, ran_since, wrong[0].stage)]
        scored = scorer.best_first(tried)
        best, alike = scorer.chosen(scored)
        if best is None or scorer.n_right(best) < len(self.checks):  # a number may leave less
            numbers = [(one,) for one in self._numbers(scorer, ran_since)]
            scored = [*scored, *scorer.best_first(numbers)]
            best, alike = scorer.chosen(scored)
            tried += numbers
        if best is None:
            scored.sort(key=lambda attempt: -attempt.explained_share)
            partial = [attempt.hypotheses[0] for attempt in scored if attempt.explained_share > PARTIAL][:2]
            pairs = [(a, b) for a in partial for (b,) in tried if a.name != b.name]
            best, alike = scorer.chosen(scorer.best_first(pairs))
        near = {a.names: a for a in reversed(scored) if a.explained_share > NEAR_MISS}  # the best of each name
        return best, alike if best else [*near.values()][:-4:-1]

    def _since(self, wrong: StageCheck) -> set[str]:
        """Collect the quantities made since the last right one of the dump, the wrong one included."""
        end = _run_index(wrong)
        failed = {_run_index(check) for check in self.checks if check.verdict == FAIL}
        right = {_run_index(check) for check in self.checks} - failed
        first = min(step.number for step in self.dump.steps if step.batches) * len(FLOW)
        last = max((index for index in right if index < end), default=first - 1)
        return {FLOW[index % len(FLOW)] for index in range(max(last + 1, end - 2 * len(FLOW)), end + 1)}

    def _numbers(self, scorer: Scorer, ran_since: set[str]) -> Iterator[Hypothesis]:
        """Yield the hypotheses of a changed number, with the value that fits the wrong quantity best."""
        number, group, _ = until = key_of(scorer.wrong[0])
        run = self.replay.run(scorer.cure, until=until)
        ours = (array for (n, of, _), array in run.arrays.items() if (n, of) == (number, "gradient"))
        norm = math.sqrt(sum(float(np.square(array).sum()) for array in ours)) or math.inf
        scale = self.adapter.scaling(next(iter(self.adapter.targets)))
        for family in setting_families(self.dump, scorer.step, scale, norm, ran_since, group):
            yield from scorer.fitted(family)

    def diagnosis(self) -> Diagnosis:
        """Collect results, findings and notes in one diagnosis."""
        alone = {key_of(check): check.isolated for check in self.judge.checks(self.replay.run(fed=False), fed=False)}
        causes = {place for finding in self.findings for place in finding.places if finding.kind != "rounding"}
        uncured = {key_of(check): check for check in self.first}
        strict = self._judge_in("float32").checks(self.replay.run())
        exact = {key_of(check) for check in strict if check.verdict == PASS}
        results = []
        for check in self.checks:
            key, is_wrong = key_of(check), (check.n_pass, check.key) in causes
            verdict = PASS if self.dtype == "float32" or key in exact else ROUNDING
            shown = replace(uncured.get(key, check) if is_wrong else check, chained=alone[key])
            results.append(shown.with_verdict(FAIL if is_wrong or check.verdict == FAIL else verdict))
        hidden, notes = could_not_show(self.replay, self.judge, self.adapter, self.weights.config)
        findings = [*self.findings, *_of_arithmetic(results, self.dtype)]
        return Diagnosis(self.model, self.dump.source, results, findings, hidden, (*self.dump.notes, *notes))


def _next(checks: Sequence[StageCheck], closed: Mapping[str, int]) -> StageCheck | None:
    """Return the first failed check whose group is not closed as unexplained, and which inherits no such error."""
    first = min(closed.values(), default=math.inf)
    wrong = (check for check in checks if check.verdict == FAIL and check.stage not in closed)
    return next((check for check in wrong if check.isolated.mode == ISOLATED or _run_index(check) < first), None)


def _run_index(check: StageCheck) -> int:
    """Return the position of a quantity in the run: the groups of all steps in a row."""
    return check.n_pass * len(FLOW) + FLOW.index(check.stage)


def _finding(
    wrong: StageCheck, of_group: Sequence[StageCheck], checks: Sequence[StageCheck], best: Attempt | None,
    near: Sequence[Attempt],
) -> Finding:  # fmt: skip
    """Make the finding of one cause.

    It covers the quantity where the cause was found. An unexplained one also covers the quantities that follow.
    """
    of_group = of_group if best else [check for check in checks if check.stage == wrong.stage]
    places = [check for check in of_group if check.verdict == FAIL]
    where = f"step {wrong.n_pass}, {wrong.key}"
    misses = tuple(attempt.causes("near miss")[0] for attempt in near)
    if best is None:
        starts_in, sentence = _unexplained(wrong, checks, where)
        kind = "not finite" if wrong.isolated.difference.fault else "unknown"
        return Finding.of(kind, places, sentence, starts_in, (), misses)
    starts_in = tuple(dict.fromkeys(hypothesis.change.mistake.stages[0] for hypothesis in best.hypotheses))
    said = " ".join(hypothesis.sentence for hypothesis in best.hypotheses)
    sentence = f"{where}: {said} This explains {_percent_or_all(best.explained_share)} of the error."
    if misses:
        sentence += f" This dump cannot tell this mistake from {', '.join(cause.name for cause in misses)}."
    return Finding.of(best.finding_kind, places, sentence, starts_in, best.causes(), misses)


def _unexplained(wrong: StageCheck, checks: Sequence[StageCheck], where: str) -> tuple[tuple[str, ...], str]:
    """Describe where an unexplained error must have been made."""
    if fault := wrong.isolated.difference.fault:
        return (wrong.key,), f"{where}: {fault}."
    before = [check.key for check in checks if _run_index(check) == _run_index(wrong)]
    first = before.index(wrong.key)
    right = f"; {first} of the {len(before)} quantities before it are right" if first else ""
    target = key_of(wrong)[2].split(".")[-2] if wrong.stage == "gradient" else ""
    behind = BEHIND.get(target, "")
    starts_in = tuple(f"l{wrong.layer}.{name}" for name in behind.split(", ")) if behind else (wrong.key,)
    off = f"error {wrong.over:.3g} times the tolerance of its arithmetic"
    return starts_in, f"{where}: this error matches no known mistake ({off}{right})."


def _percent_or_all(share: float) -> str:
    return "all" if share >= 0.99995 else f"{100 * share:.2f} %"


def _of_arithmetic(results: Sequence[StageCheck], dtype: DtypeName) -> list[Finding]:
    """Report the differences that half precision makes in a right run; empty if there are none."""
    roundings = [result for result in results if result.verdict == ROUNDING]
    if not roundings:
        return []
    most = max(roundings, key=lambda result: result.over)
    said = f"{len(roundings)} quantities differ as {dtype} explains, by at most {most.over:.2g} of its tolerance"
    return [Finding.of("rounding", roundings, said, ())]
