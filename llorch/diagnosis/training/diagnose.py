"""The first wrong quantity of anybody's LoRA training, and the mistake that makes it.

A step is a chain: logits, losses, the loss, gradients from the last layer to the first, clipping, moments, parameters.
Each is computed again from the dump's inputs. At the first wrong quantity, known mistakes are injected into llorch's
step, and numbers moved, until one of them gives the dump's numbers. The rest is judged with that mistake in the code,
so the next wrong quantity has another cause. An unexplained error matches no known mistake. Quantities that follow from
it are not judged.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from llorch.diagnosis.training.gaps import could_not_show
from llorch.diagnosis.training.hypotheses import TrainingHypothesis, families, known, where_of
from llorch.diagnosis.training.judge import JudgedArray, TrainingJudge, first_wrong
from llorch.diagnosis.training.replay import FLOW, Key, TrainingReplay
from llorch.diagnosis.training.score import AFTER_CLIPPING, NEAR, Cure, Scored, Scorer
from llorch.diagnosis.verdict import HONEST, RIGHT, WRONG, Diagnosis, Finding, StageResult, Suspect
from llorch.engines.dumps.raw import RawDump
from llorch.engines.dumps.training_dump import TrainingDump, training_dump
from llorch.files import Weights
from llorch.judging.expectations.training_places import ISOLATED
from llorch.lora.adapter import Adapter
from llorch.ops.numerics import DtypeName

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
    found = _Search(wide, adapter, dump, dtype)
    unknown = {place for finding in found.findings if finding.kind == "unknown" for place in finding.places}
    if dtype == "float32" and not dump.dtype and unknown:
        in_half = _Search(wide, adapter, dump, HALF[0])
        half_keys = {(row.key[0], _key(row.key)) for row in in_half.rows}
        found = in_half if unknown <= half_keys and not in_half.findings else found
    return found.diagnosis(model)


def _dtype(dump: TrainingDump) -> DtypeName:
    """Infer the dtype of activations: the dump's declaration, else the stored dtype of the logits, else float32."""
    logits = [s.stored for step in dump.steps for (group, _), s in step.shown.items() if group == "adapted_logits"]
    found: list[DtypeName] = [half for half in HALF if half in (dump.dtype, *logits)]
    return found[0] if found else "float32"


class _Search:
    """The findings of one dump in one arithmetic."""

    def __init__(self, weights: Weights, adapter: Adapter, dump: TrainingDump, dtype: DtypeName) -> None:
        self.weights, self.adapter = weights, adapter
        self.dtype: DtypeName = dtype
        self.findings: list[Finding] = []
        self._take(dump)
        self._run()

    def _take(self, dump: TrainingDump) -> None:
        """Replay and judge this dump from now on."""
        self.dump, self.replay = dump, TrainingReplay(self.weights, self.adapter, dump)
        self.judge = TrainingJudge(dump, self.weights.config, self.adapter.flat(), self.dtype)

    def _run(self) -> None:
        """Name the first cause, judge the rest with it in the code, and so on."""
        cure: Cure = ()
        closed: dict[str, int] = {}  # quantities that nothing explains: where they are wrong first
        self.first = self.judge.rows(self.replay.run())
        while True:
            self.rows = self.judge.rows(self.replay.run(cure))
            wrong = _next(self.rows, closed)
            if wrong is None or len(self.findings) == MOST_FINDINGS:
                break
            of_group = [row for row in self.rows if row.key[:2] == wrong.key[:2]]
            best, near = (None, []) if wrong.difference.fault else self._explained(of_group, cure)
            self.findings.append(_finding(wrong, of_group, self.rows, best, near))
            if best is None:
                closed[wrong.key[1]] = _run_index(wrong.key)
            elif best.cause[0].name == AFTER_CLIPPING:
                self._take(self.dump.as_clipped())
            else:
                cure += best.injected

    def _explained(self, wrong: Sequence[JudgedArray], cure: Cure) -> tuple[Scored | None, list[Scored]]:
        """Find the cause that makes a wrong quantity as the dump shows it.

        Try known mistakes first, then numbers as they fit best, then two causes at once. Also return the causes that
        cannot be told from the best one; if there is no best one, return the causes that come near.
        """
        scorer, ran_since = Scorer(self.replay, self.judge, wrong, cure), self._since(wrong[0].key)
        tried = [(one,) for one in known(self.weights.config, ran_since, wrong[0].key[1])]
        scored = scorer.best_first(tried)
        best, alike = scorer.chosen(scored)
        if best is None or scorer.n_right(best) < len(self.rows):  # a number may leave less
            numbers = [(one,) for one in self._numbers(scorer, ran_since)]
            scored = [*scored, *scorer.best_first(numbers)]
            best, alike = scorer.chosen(scored)
            tried += numbers
        if best is None:
            scored.sort(key=lambda one: -one.share)
            partial = [one.cause[0] for one in scored if one.share > PARTIAL][:2]
            pairs = [(a, b) for a in partial for (b,) in tried if a.name != b.name]
            best, alike = scorer.chosen(scorer.best_first(pairs))
        near = {one.names: one for one in reversed(scored) if one.share > NEAR}  # the best of each name
        return best, alike if best else [*near.values()][:-4:-1]

    def _since(self, wrong: Key) -> set[str]:
        """Collect the quantities made since the last right one of the dump, the wrong one included."""
        right: dict[int, bool] = {}
        for row in self.rows:
            right[_run_index(row.key)] = right.get(_run_index(row.key), True) and row.over <= 1
        first = min(step.number for step in self.dump.steps if step.batches) * len(FLOW)
        last = max((at for at, all_right in right.items() if all_right and at < _run_index(wrong)), default=first - 1)
        return {
            FLOW[at % len(FLOW)]
            for at in range(max(last + 1, _run_index(wrong) - 2 * len(FLOW)), _run_index(wrong) + 1)
        }

    def _numbers(self, scorer: Scorer, ran_since: set[str]) -> Iterator[TrainingHypothesis]:
        """Yield the hypotheses of a changed number, with the value that fits the wrong quantity best."""
        number, group, _ = scorer.wrong[0].key
        run = self.replay.run(scorer.cure, until=scorer.wrong[0].key)
        ours = (array for (n, of, _), array in run.arrays.items() if (n, of) == (number, "gradient"))
        norm = math.sqrt(sum(float(np.square(array).sum()) for array in ours)) or math.inf
        scale = self.adapter.scaling(next(iter(self.adapter.targets)))
        for family in families(self.dump, scorer.step, scale, norm):
            for where in where_of(family, group):
                if family.group in ran_since or where == "back":
                    yield from scorer.fitted(family, where, norm)

    def diagnosis(self, model: str) -> Diagnosis:
        """Collect results, findings and notes in one diagnosis."""
        alone = {row.key: row for row in self.judge.rows(self.replay.run(fed=False), fed=False)}
        causes = {place for finding in self.findings for place in finding.places if finding.kind != "honest"}
        uncured = {row.key: row for row in self.first}
        strict = TrainingJudge(self.dump, self.weights.config, self.adapter.flat(), "float32")
        exact = {row.key for row in strict.rows(self.replay.run()) if row.over <= 1}
        results = []
        for row in self.rows:
            wrong = (row.key[0], _key(row.key)) in causes
            shown = uncured.get(row.key, row) if wrong else row
            right = RIGHT if self.dtype == "float32" or row.key in exact else HONEST
            results.append(_result(shown, alone[row.key], self.dtype, WRONG if wrong or row.over > 1 else right))
        hidden, notes = could_not_show(self.replay, self.judge, self.adapter, self.weights.config)
        findings = [*self.findings, *_of_arithmetic(results, self.dtype)]
        return Diagnosis(model, self.dump.source, results, findings, hidden, (*self.dump.notes, *notes))


def _next(rows: Sequence[JudgedArray], closed: Mapping[str, int]) -> JudgedArray | None:
    """Return the first wrong row whose group is not closed as unexplained, and which inherits no unexplained error."""
    first = min(closed.values(), default=math.inf)
    left = [row for row in rows if row.key[1] not in closed and (row.mode == ISOLATED or _run_index(row.key) < first)]
    return first_wrong(left)


def _run_index(key: Sequence) -> int:
    """Return the position of a quantity in the run: the groups of all steps in a row."""
    return key[0] * len(FLOW) + FLOW.index(key[1])


def _key(key: Key) -> str:
    """Format the name of a place in training: `l0.gradient.q_proj.lora_A`."""
    _, group, name = key
    if name.startswith("layers."):
        _, layer, name = name.split(".", 2)
        group = f"l{layer}.{group}"
    return f"{group}.{name}" if name else group


def _layer(key: Key) -> int | None:
    return int(key[2].split(".")[1]) if key[2].startswith("layers.") else None


def _finding(
    wrong: JudgedArray,
    of_group: Sequence[JudgedArray],
    rows: Sequence[JudgedArray],
    best: Scored | None,
    near: Sequence[Scored],
) -> Finding:
    """Make the finding of one cause.

    It covers the quantity where the cause was found. An unexplained one also covers the quantities that follow.
    """
    of_group = of_group if best else [row for row in rows if row.key[1] == wrong.key[1]]
    places = [row for row in of_group if row.over > 1]
    where = f"step {wrong.key[0]}, {_key(wrong.key)}"
    if best is None:
        kind = "not finite" if wrong.difference.fault else "unknown"
        starts_in, sentence = _unexplained(wrong, rows, where)
    else:
        kind = "honest" if all(one.honest for one in best.cause) else "mistake"
        starts_in = tuple(dict.fromkeys(one.injected.mistake.stages[0] for one in best.cause))
        said = " ".join(one.sentence for one in best.cause)
        sentence = f"{where}: {said} This explains {_percent_or_all(best.share)} of the error."
        if near:
            alike = ", ".join(one.cause[0].name for one in near)
            sentence += f" This dump cannot tell this mistake from {alike}."
    suspects = () if best is None else tuple(_suspect(one, places, best) for one in best.cause)
    misses = tuple(_suspect(one.cause[0], places, one) for one in near)
    layers = tuple(sorted({layer for row in places if (layer := _layer(row.key)) is not None}))
    return Finding(
        kind, _key(wrong.key), wrong.key[0], starts_in, layers, suspects, misses,
        tuple((row.key[0], _key(row.key)) for row in places), sentence,
    )  # fmt: skip


def _unexplained(wrong: JudgedArray, rows: Sequence[JudgedArray], where: str) -> tuple[tuple[str, ...], str]:
    """Describe where an unexplained error must have been made."""
    if wrong.difference.fault:
        return (_key(wrong.key),), f"{where}: {wrong.difference.fault}."
    before = [row for row in rows if row.key[:2] == wrong.key[:2]]
    first = before.index(wrong)
    right = f"; {first} of the {len(before)} quantities before it are right" if first else ""
    target = wrong.key[2].split(".")[-2] if wrong.key[1] == "gradient" else ""
    behind = BEHIND.get(target, "")
    starts_in = tuple(f"l{_layer(wrong.key)}.{name}" for name in behind.split(", ")) if behind else (_key(wrong.key),)
    off = f"error {wrong.over:.3g} times the tolerance of its arithmetic"
    return starts_in, f"{where}: this error matches no known mistake ({off}{right})."


def _suspect(one: TrainingHypothesis, places: Sequence[JudgedArray], scored: Scored) -> Suspect:
    injected = tuple(_key(row.key) for row in places)
    return Suspect(one.name, one.sentence, injected, scored.share, scored.left, one.value)


def _percent_or_all(share: float) -> str:
    return "all" if share >= 0.99995 else f"{100 * share:.2f} %"


def _result(row: JudgedArray, alone: JudgedArray, dtype: DtypeName, verdict: str) -> StageResult:
    """Convert a judged array to a result; `alone` is the array judged in a run without the engine's arrays."""
    number, group, _ = row.key
    arithmetic = dtype if row.mode != ISOLATED else "float32"
    return StageResult(
        number, _key(row.key), group, _layer(row.key), row.shown.name, row.difference, row.tolerance, alone.difference,
        alone.tolerance, arithmetic, verdict, (group,),
    )  # fmt: skip


def _of_arithmetic(results: Sequence[StageResult], dtype: DtypeName) -> list[Finding]:
    """Report the differences that half precision makes in a right run; empty if there are none."""
    honest = [result for result in results if result.verdict == HONEST]
    if not honest:
        return []
    most = max(honest, key=lambda result: result.over)
    said = f"{len(honest)} quantities differ as {dtype} explains, by at most {most.over:.2g} of its tolerance"
    places = tuple((result.n_pass, result.key) for result in honest)
    return [Finding("honest", honest[0].key, honest[0].n_pass, (), (), (), (), places, said)]
