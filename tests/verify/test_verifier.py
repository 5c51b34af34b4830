from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from llorch import forward as forward_page
from llorch import stages
from llorch.builtin import builtin_path, goldens_folder
from llorch.files import open_weights
from llorch.sampling import SamplingSettings, probabilities, softmax
from llorch.verify.compare import FLOOR, Tolerance
from llorch.verify.goldens import Evidence, Golden, read, sampler_inputs
from llorch.verify.verifier import FAIL, PASS, TIE, WORST, Verifier, ceiling, edge_of_top_p, on_scale_of, true_gap

NAME = "micro-qwen3"


@pytest.fixture(scope="module")
def golden() -> Golden:
    return read(goldens_folder() / NAME)


def verifier(golden: Golden, evidence: dict[str, Evidence]) -> Verifier:
    return Verifier(NAME, open_weights(builtin_path(NAME)), golden.cases, evidence, golden.truth)


def changed(golden: Golden, key: str, change: Callable[[np.ndarray], np.ndarray]) -> dict[str, Evidence]:
    evidence = dict(golden.evidence)
    arrays = evidence["llamacpp"].arrays()
    arrays[key] = change(arrays[key])
    return evidence | {"llamacpp": Evidence.from_arrays(arrays)}


def failing(golden: Golden, evidence: dict[str, Evidence]) -> list[tuple[str, str, str]]:
    rows = verifier(golden, evidence).rows(golden.tolerances)
    return [(row.checkpoint, row.stage, row.mode) for row in rows if row.verdict == FAIL]


def nudge(array: np.ndarray) -> np.ndarray:
    out = array.copy()
    out.flat[7] += 1e-3 * np.abs(array).max()
    return out


def test_untouched_goldens_pass(golden: Golden):
    assert failing(golden, dict(golden.evidence)) == []


@pytest.mark.parametrize(
    ("key", "checkpoint"),
    [("near/l1.ffn_gate", "06"), ("far/l0.q_rope", "01b"), ("near/l0.attn_probs", "04"), ("near/logits", "08")],
)
def test_one_changed_number_of_a_golden_fails_its_stage_in_both_modes(golden: Golden, key: str, checkpoint: str):
    bad = failing(golden, changed(golden, key, nudge))
    stage = key.rpartition("/")[2].rpartition(".")[2]
    assert (checkpoint, stage, "isolated") in bad
    assert (checkpoint, stage, "chained") in bad


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_golden_that_is_not_finite_never_passes(golden: Golden, value: float):
    def poison(array: np.ndarray) -> np.ndarray:
        out = array.copy()
        out.flat[0] = value
        return out

    bad = failing(golden, changed(golden, "near/l0.attn_out", poison))
    assert ("05", "attn_out", "isolated") in bad


def test_a_stage_missing_from_a_golden_is_refused_by_name(golden: Golden):
    arrays = golden.evidence["transformers"].arrays()
    del arrays["far/l1.ffn_up"]
    with pytest.raises(ValueError, match=r"far trace of transformers must have the .* stages.*: l1\.ffn_up"):
        verifier(golden, {"transformers": Evidence.from_arrays(arrays)})


def test_another_greedy_token_fails_unless_the_logits_tie(golden: Golden):
    theirs = golden.evidence["llamacpp"]
    other = theirs.greedy.copy()
    other[3] += 1
    bad = failing(golden, {"llamacpp": replace(theirs, greedy=other)})
    assert bad == [("12", "generation", "exact")]


def test_a_wrong_truth_cannot_widen_the_tolerance_beyond_the_ceiling(golden: Golden):
    wrong = {
        name: replace(e, traces={c: {k: 1.5 * a for k, a in t.items()} for c, t in e.traces.items()})
        for name, e in golden.evidence.items()
    }
    judge = verifier(golden, wrong)
    tolerances = judge.tolerances()
    highest = ceiling("chained", int(golden.cases["near"].positions[-1]))
    assert tolerances["near"]["chained"]["logits"] == highest
    verdicts = {row.verdict for row in judge.stage_rows(tolerances) if row.stage == "logits" and row.mode == "chained"}
    assert verdicts == {FAIL}


@pytest.fixture(scope="module")
def lucky(golden: Golden) -> Verifier:
    """A judge of engines that show the truth itself, rounded: all they grant is the floor."""
    judge = verifier(golden, dict(golden.evidence))
    shown = {
        producer: replace(
            evidence,
            traces={case: {key: a.astype(np.float32) for key, a in t.items()} for case, t in judge.truth.items()},
            selected_logits=judge.truth["near"]["logits"][-1].astype(np.float32),
        )
        for producer, evidence in golden.evidence.items()
    }
    return verifier(golden, shown)


def in_four_lanes(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """A product as processors with short registers add it up; this model has no biases."""
    assert bias is None
    terms = (x[:, None] * weight).reshape(len(x), len(weight), -1, 4)
    return np.cumsum(terms, axis=2, dtype=x.dtype)[:, :, -1].sum(axis=-1, dtype=x.dtype)


def test_sums_in_another_order_pass_beside_engines_that_happen_to_be_exact(
    lucky: Verifier, monkeypatch: pytest.MonkeyPatch
):
    tolerances = lucky.tolerances()
    assert tolerances["near"]["chained"]["ffn_out"] == Tolerance(FLOOR, FLOOR)
    for page in (forward_page, stages):
        monkeypatch.setattr(page, "linear", in_four_lanes)
    rows = list(lucky.stage_rows(tolerances))
    assert [row for row in rows if row.error > row.tolerance or row.worst > row.tolerance_worst]  # engines alone
    assert [row for row in lucky.rows(tolerances) if row.verdict == FAIL] == []


def test_what_is_derived_is_a_few_roundings_and_never_above_the_ceiling(lucky: Verifier):
    exact = Tolerance(0.0, 0.0)
    for mode, most in (("isolated", 1e-6), ("chained", 3e-6)):
        made = lucky._allowed(exact, "near", mode, "ffn_out")
        assert FLOOR <= made.error <= most
        assert made.worst == WORST * made.error
        assert lucky._allowed(Tolerance(9.0, 9.0), "near", mode, "ffn_out") == ceiling(mode, 11)


def test_stored_tolerances_are_capped_too(golden: Golden):
    wide = {
        case: {mode: dict.fromkeys(stages, Tolerance(9.0, 9.0)) for mode, stages in modes.items()}
        for case, modes in golden.tolerances.items()
    }
    rows = verifier(golden, changed(golden, "near/l1.ffn_gate", nudge)).rows(wide)
    assert {row.stage for row in rows if row.verdict == FAIL and row.mode == "isolated"} >= {"ffn_gate"}


def test_tolerances_made_now_are_the_stored_ones(golden: Golden):
    made = verifier(golden, dict(golden.evidence)).tolerances()
    for case, modes in golden.tolerances.items():
        for mode, by_stage in modes.items():
            for stage, stored in by_stage.items():
                assert made[case][mode][stage].error == pytest.approx(stored.error, rel=1e-3)


LOGITS, _ = sampler_inputs(range(8), 1000)
AHEAD = np.cumsum(np.sort(softmax(LOGITS.astype(np.float64)))[::-1])[200]  # the mass of all tokens ahead of number 201


@pytest.mark.parametrize(
    ("p", "settings", "swapped", "factor", "excused"),
    [
        (AHEAD + 1e-6, {}, False, 1.0, True),
        (AHEAD + 1e-6, {}, True, 1.0, False),  # ours is the one that lacks it
        (AHEAD + 1e-4, {}, False, 1.0, False),  # float32 sums of a thousand terms are nearer
        (AHEAD - 1e-6, {}, True, 1.0, False),  # neither has it
        (AHEAD + 1e-6, {"top_k": 900}, False, 1.0, False),
        (AHEAD + 1e-6, {"min_p": 1e-6}, False, 1.0, False),
        (AHEAD + 1e-6, {"repetition_penalty": 1.1}, False, 1.0, False),
        (AHEAD + 1e-6, {}, False, 1.01, False),
    ],
)
def test_only_a_token_that_the_true_sum_puts_at_the_edge_of_top_p_may_be_missing_from_a_golden(
    p: float, settings: dict[str, float], swapped: bool, factor: float, excused: bool
):
    chosen = SamplingSettings(temperature=1.0, top_p=float(p), **settings)  # pyright: ignore[reportArgumentType]
    ours = probabilities(LOGITS, chosen, ())
    golden = ours.copy()
    golden[np.flatnonzero(ours)[ours[ours > 0].argmin()]] = 0
    golden[ours.argmax()] *= factor
    ours, golden = (golden, ours) if swapped else (ours, golden)
    said = edge_of_top_p(ours, golden, LOGITS, chosen, Tolerance(1e-6, 1e-6))
    assert said.startswith("1 tokens at the edge of top-p, 1.0e-06 from p; ") == excused


def test_the_gap_of_a_near_tie_is_that_of_the_truth_to_the_less_likely_of_both():
    true = np.asarray([4.0, 3.0, -5.0])
    assert true_gap(true, 0, 0) == 0
    assert true_gap(true, 1, 0) == true_gap(true, 0, 1) == true_gap(true, 1, 1) == pytest.approx(1 / np.sqrt(50 / 3))
    assert true_gap(true, 0, 3) == true_gap(true, -1, 0) == np.inf


def test_what_a_part_of_an_array_is_granted_is_what_the_whole_is():
    whole = np.asarray([[8.0, 0.0], [-1.0, 1.0], [-np.inf, 2.0]])
    granted = on_scale_of(whole[1:2], whole, Tolerance(1e-6, 1e-5))
    assert granted.error == pytest.approx(1e-6 * np.sqrt(70 / 6))
    assert granted.worst == pytest.approx(8e-5)
    assert on_scale_of(np.zeros(2), whole, Tolerance(1e-6, 1e-5)) == Tolerance(1e-6, 1e-5)


def test_verdicts_are_three_words():
    assert len({PASS, FAIL, TIE}) == 3
