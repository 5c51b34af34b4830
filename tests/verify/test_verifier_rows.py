"""What the verifier's rows say and which there are: argmax, near-ties, second passes, distances from the truth."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from planted import golden_of, weights_of

from llorch.builtin import BUILTIN
from llorch.forward import forward
from llorch.stages import BY_NAME, key, keys
from llorch.verify import verifier
from llorch.verify.goldens import N_GREEDY, PRODUCERS, Evidence
from llorch.verify.replay import cut
from llorch.verify.verifier import FAIL, TIE, Row, Verifier, ceiling, on_scale_of

MODEL = "micro-qwen2"


def judge(producer: str = "llamacpp", model: str = MODEL, **changes: object) -> Verifier:
    """The verifier with one producer, whose evidence is changed."""
    golden = golden_of(model)
    evidence: Mapping[str, Evidence] = {producer: replace(golden.evidence[producer], **changes)}
    return Verifier(model, weights_of(model), golden.cases, evidence, golden.truth)


def sampler_rows(judge: Verifier) -> dict[str, Row]:
    return {row.stage: row for row in judge.sampler_rows(golden_of(MODEL).tolerances)}


def with_best(producer: str, token: int) -> np.ndarray:
    """The logits that the producer selected, with another token on top."""
    row = golden_of(MODEL).evidence[producer].selected_logits.copy()
    row[token] = row.max() * (1 + 1e-6) + 1e-6
    return row


@pytest.mark.parametrize("producer", PRODUCERS)
def test_another_best_token_of_a_producer_fails_checkpoint_10(producer: str):
    best = int(np.argmax(golden_of(MODEL).evidence[producer].selected_logits))
    other = (best + 5) % weights_of(MODEL).config.vocab_size
    row = sampler_rows(judge(producer, selected_logits=with_best(producer, other)))["argmax"]
    assert (row.checkpoint, row.verdict) == ("10", FAIL)
    assert row.note.startswith(f"token 0: got {best}, want {other}, true gap ")


@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.parametrize("model", BUILTIN)
def test_the_first_greedy_token_of_a_producer_is_its_best(model: str, producer: str):
    evidence = golden_of(model).evidence[producer]
    assert evidence.greedy[0] == np.argmax(evidence.selected_logits)
    assert len(evidence.greedy) == N_GREEDY


def with_true_gap(monkeypatch: pytest.MonkeyPatch, at: int, share: float) -> int:
    """Bring the two best logits of the truth close together at one step; they stay in order. Gives the second's id."""
    right, text = Verifier._true_step, golden_of(MODEL).evidence["llamacpp"].greedy
    true = right(judge(), text, at)
    assert true is not None
    second = int(np.argsort(true)[-2])

    def near_tie(verifier: Verifier, text: np.ndarray, step: int) -> np.ndarray | None:
        true = right(verifier, text, step)
        if true is None or step != at:
            return true
        (true := true.copy())[second] = true.max() - share * np.sqrt(np.square(true).mean())
        return true

    monkeypatch.setattr(Verifier, "_true_step", near_tie)
    return second


@pytest.mark.parametrize(("share", "verdict"), [(1e-6, TIE), (1e-5, FAIL), (1e-3, FAIL)])
def test_another_greedy_token_is_a_tie_only_where_the_truth_nearly_has_one(
    monkeypatch: pytest.MonkeyPatch, share: float, verdict: str
):
    second = with_true_gap(monkeypatch, 5, share)
    golden = golden_of(MODEL).evidence["llamacpp"].greedy
    got = int(golden[5])
    (greedy := golden.copy())[5] = second
    greedy[6:] = judge()._text(greedy[:6].tolist(), len(greedy) - 6)  # as an engine goes on behind its own token
    row = sampler_rows(judge(greedy=greedy))["generation"]
    assert row.verdict == verdict
    assert row.note.startswith(f"token 5: got {got}, want {second}, true gap ")
    n_vocab = weights_of(MODEL).config.vocab_size
    for at, token in ((5, (max(got, second) + 1) % n_vocab), (2, int(golden[2] + 1) % n_vocab), (8, second)):
        (other := greedy.copy())[at] = token  # neither of the two, or beside another step
        assert sampler_rows(judge(greedy=other))["generation"].verdict == FAIL


def test_constant_logits_of_ours_are_no_tie_where_the_truth_has_a_margin(monkeypatch: pytest.MonkeyPatch):
    def constant(*given: Any, **settings: Any) -> np.ndarray:
        return np.ones_like(forward(*given, **settings))

    monkeypatch.setattr(verifier, "forward", constant)
    rows = sampler_rows(judge())
    assert {rows[stage].verdict for stage in ("selected_logits", "argmax", "generation")} == {FAIL}


@pytest.mark.parametrize("token", [-1, 10**9])
def test_a_token_that_the_model_does_not_have_is_no_tie(token: int):
    greedy = golden_of(MODEL).evidence["llamacpp"].greedy.copy()
    greedy[3] = token
    assert sampler_rows(judge(greedy=greedy))["generation"].verdict == FAIL


@pytest.mark.parametrize("change", [lambda a: a[:0], lambda a: a[None], lambda a: a.astype(np.int32)])
def test_a_text_of_another_form_fails_and_is_no_tie(change: Callable[[np.ndarray], np.ndarray]):
    row = sampler_rows(judge(greedy=change(golden_of(MODEL).evidence["llamacpp"].greedy)))["generation"]
    assert row.verdict == FAIL
    assert row.note.startswith(("empty: ", "shape: got", "dtype: got"))


def test_the_last_token_of_the_text_is_compared():
    greedy = golden_of(MODEL).evidence["llamacpp"].greedy.copy()
    greedy[-1] = (greedy[-1] + 1) % weights_of(MODEL).config.vocab_size
    assert sampler_rows(judge(greedy=greedy))["generation"].verdict == FAIL


def test_tokens_at_the_edge_of_a_filter_fail_in_every_row():
    probabilities = dict(golden_of(MODEL).evidence["llamacpp"].probabilities)
    changed = {name: array.copy() for name, array in probabilities.items()}
    for name in ("top_k", "top_p", "min_p", "all"):
        kept = np.flatnonzero(changed[name])
        changed[name][kept[changed[name][kept].argmin()]] = 0
    rows = sampler_rows(judge(probabilities=changed))
    failed = {name for name in changed if rows[f"probabilities.{name}"].verdict == FAIL}
    assert failed == {"top_k", "top_p", "min_p", "all"}


def test_second_passes_of_every_case_compare_every_stage():
    rows = list(judge().decode_rows(golden_of(MODEL).tolerances))
    places = {(stage.name, layer) for _, stage, layer in keys(weights_of(MODEL).config)}
    for case, whole in golden_of(MODEL).cases.items():
        n = len(whole.ids)
        for n_cached in (1, n // 2, n - 1):
            assert {(r.stage, r.layer) for r in rows if r.case == f"{case}, {n_cached} cached"} == places
    assert len({row.case for row in rows}) == 6
    assert {row.checkpoint for row in rows} == {"03"}


@pytest.mark.parametrize("name", ["l1.k_cache", "l0.v_cache", "l1.attn_context", "l0.ffn_act", "logits"])
def test_one_changed_number_of_a_golden_fails_the_second_passes_that_look_at_it(name: str):
    golden = golden_of(MODEL).evidence["llamacpp"]
    array = golden.traces["far"][name].copy()
    array.flat[-1] += 1e-2 * np.abs(array).max()
    traces = {**golden.traces, "far": {**golden.traces["far"], name: array}}
    rows = judge(traces=traces).decode_rows(golden_of(MODEL).tolerances)
    failed = {(row.case, row.stage) for row in rows if row.verdict == FAIL}
    assert failed == {(f"far, {n} cached", name.split(".")[-1]) for n in (1, 4, 7)}


def test_every_row_is_held_to_the_tolerance_of_its_own_case_mode_and_stage():
    tolerances = golden_of(MODEL).tolerances
    verifier = judge()
    rows = [row for row in verifier.rows(tolerances) if row.mode != "exact"]
    assert {row.mode for row in rows} == {"isolated", "chained", "decode"}
    for row in rows:
        mode = "chained" if row.mode == "decode" else row.mode
        case, stage = row.case.split(",")[0], row.stage.split(".")[0]
        allowed = verifier._allowed(tolerances[case][mode][stage], case, mode, stage)
        if row.mode == "decode":  # on the scale of the rows that are decoded
            array = verifier.evidence[row.producer].traces[case][key(stage, row.layer)]
            allowed = on_scale_of(cut(BY_NAME[stage], array, int(row.case.split()[1])), array, allowed)
            allowed = allowed.at_most(verifier.ceiling_of(case, mode, stage))
        assert (row.tolerance, row.tolerance_worst) == (allowed.error, allowed.worst)
    logits = {case: modes["isolated"]["logits"].error for case, modes in tolerances.items()}
    assert logits["near"] < tolerances["near"]["chained"]["logits"].error  # else nothing is shown by this test


def test_a_stage_that_the_model_does_not_have_is_refused_by_name():
    traces = golden_of(MODEL).evidence["llamacpp"].traces
    more = {**traces["near"], "l0.q_norm": traces["near"]["l0.q_rope"]}
    with pytest.raises(ValueError, match=r"near trace of llamacpp must have .*: l0\.q_norm; run reference_outputs"):
        judge(traces={**traces, "near": more})


def test_an_isolated_row_has_the_stored_distance_of_its_golden_and_none_of_its_own():
    stored = golden_of(MODEL).truth.isolated["llamacpp"]
    for row in judge().stage_rows(golden_of(MODEL).tolerances):
        if row.mode == "isolated":
            assert np.isnan(row.truth_error)
            assert row.producer_error == stored[row.case][key(row.stage, row.layer)].error


def test_the_distances_of_a_chained_row_are_from_the_golden_and_from_the_truth():
    right = judge()
    golden = right.evidence["llamacpp"]
    far = {
        key: array * np.float32(1.001) if key == "l0.ffn_up" else array for key, array in golden.traces["near"].items()
    }
    wrong = judge(traces={**golden.traces, "near": far})
    before, after = (
        next(r for r in v.stage_rows(golden_of(MODEL).tolerances) if place(r) == ("near", "chained", "ffn_up", 0))
        for v in (right, wrong)
    )
    assert after.truth_error == before.truth_error
    assert 0 < before.truth_error < 1e-6
    assert after.producer_error == pytest.approx(1e-3, rel=0.01)
    assert 0 < before.producer_error < 1e-5
    assert after.error == pytest.approx(1e-3, rel=0.01)
    assert before.error != before.producer_error


def place(row: Row) -> tuple[str, str, str, int | None]:
    return row.case, row.mode, row.stage, row.layer


@pytest.mark.parametrize("model", BUILTIN)
def test_stored_tolerances_follow_from_the_stored_goldens_and_stay_below_the_ceiling(model: str):
    golden = golden_of(model)
    made = Verifier(model, weights_of(model), golden.cases, golden.evidence, golden.truth).tolerances()
    assert made.keys() == golden.tolerances.keys() == golden.cases.keys()
    for case, modes in golden.tolerances.items():
        assert modes.keys() == made[case].keys()
        for mode, by_stage in modes.items():
            highest = ceiling(mode, int(golden.cases[case].positions[-1]))
            assert by_stage.keys() == made[case][mode].keys()
            for stage, stored in by_stage.items():
                assert stored.error == pytest.approx(made[case][mode][stage].error, rel=1e-3), f"{case} {mode} {stage}"
                assert stored.worst == pytest.approx(made[case][mode][stage].worst, rel=1e-3), f"{case} {mode} {stage}"
                assert stored.error <= highest.error
                assert stored.worst <= highest.worst
