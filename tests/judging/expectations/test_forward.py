"""Expectations of the forward pass: its rows, their text, the faults that turn them red, ties, tokens at an edge."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from helpers.refusals import assert_tells, refuses
from helpers.stored_goldens import golden_of, suite_of, weights_of

from llorch.judging.expectations.forward import COPIES, ForwardExpectations
from llorch.judging.expectations.tokens import GreedyJudge, edge_of_top_p
from llorch.judging.expert_selection import StageOverride, identity
from llorch.judging.goldens.forward import ENGINES, N_GREEDY, EngineOutput, ReferenceOutput, sampler_inputs
from llorch.judging.runner_check import RunnerCheck, check_runner
from llorch.judging.runners import StageObserver, Trace
from llorch.judging.runners import numpy as numpy_runner
from llorch.judging.runners.numpy import FLOAT64, OWN_SUMS, NumpyRunner
from llorch.judging.tolerances.forward import MATHEMATICS, NO_TIES, ForwardTolerances, Margins
from llorch.judging.types import Comparison
from llorch.model import forward as forward_page
from llorch.model.cache import KVCache
from llorch.ops.sampling import SamplingSettings, probabilities, softmax
from llorch.runtime.builtin import BUILTIN
from llorch.stages.comparison import EXACT, FACTOR, FAIL, FLOOR, PASS, TIE, Difference, Tolerance, measure
from llorch.stages.stage_ref import Pass
from llorch.stages.table import BY_NAME, key, keys

MODEL = "micro-qwen3"
GOLDEN = golden_of(MODEL)
THEIRS = GOLDEN.engine_outputs["llamacpp"]


def suite(
    engine_outputs: Mapping[str, EngineOutput] | None = None, reference: ReferenceOutput | None = GOLDEN.reference
) -> ForwardExpectations:
    return ForwardExpectations(
        MODEL, weights_of(MODEL), GOLDEN.cases, engine_outputs or GOLDEN.engine_outputs, reference
    )


def runner(name: str = "numpy") -> NumpyRunner:
    return NumpyRunner(weights_of(MODEL), name)


def with_changed_stage(case: str, name: str, change: Callable[[np.ndarray], np.ndarray]) -> dict[str, EngineOutput]:
    """The stored goldens, with a stage of llama.cpp changed."""
    trace = THEIRS.traces[case]
    traces = {**THEIRS.traces, case: {**trace, name: change(trace[name].copy())}}
    return {**GOLDEN.engine_outputs, "llamacpp": replace(THEIRS, traces=traces)}


def sampler_rows(
    engine_output: EngineOutput, reference: ReferenceOutput | None = GOLDEN.reference
) -> dict[str, Comparison]:
    return {
        c.stage_ref.name: c for c in RunnerCheck(suite({"llamacpp": engine_output}, reference), runner()).sampler_rows()
    }


def failing(comparisons: list[Comparison]) -> set[tuple[str, str, str, str]]:
    failed = ((c.stage_ref, c.mode) for c in comparisons if c.verdict == FAIL)
    return {(stage_ref.checkpoint, stage_ref.name, mode, stage_ref.run) for stage_ref, mode in failed}


def test_the_token_of_a_golden_is_not_chosen_by_our_code(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.judging.runner_check.greedy", lambda logits: int(logits.argmin()))
    assert sampler_rows(THEIRS)["argmax"].verdict == FAIL


def nudge(array: np.ndarray) -> np.ndarray:
    array.flat[-1] += 1e-2 * np.abs(array).max()
    return array


def poison(array: np.ndarray) -> np.ndarray:
    array.flat[-1] = np.nan
    return array


@pytest.mark.slow_cases(but=["nudge-far-l0.q_rope-01b", "poison-near-logits-08"])
@pytest.mark.parametrize(
    ("case", "name", "checkpoint"),
    [
        ("near", "l1.ffn_gate", "06"), ("far", "l0.q_rope", "01b"), ("near", "l0.attn_probs", "04"),
        ("near", "logits", "08"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("change", [nudge, poison])
def test_one_changed_number_of_a_golden_fails_its_stage_in_every_mode(
    case: str, name: str, checkpoint: str, change: Callable
):
    bad = failing(check_runner(suite(with_changed_stage(case, name, change)), runner()))
    stage, n = name.rpartition(".")[2], len(GOLDEN.cases[case].ids)
    assert {(checkpoint, stage, mode, case) for mode in ("isolated", "chained")} <= bad
    assert {("03", stage, "decode", f"{case}, {k} cached") for k in (1, n // 2, n - 1)} <= bad
    assert {place for *_, place in bad} <= {case, *(f"{case}, {k} cached" for k in (1, n // 2, n - 1))}


@pytest.mark.parametrize("token", [0, 5])
def test_one_token_that_is_a_little_off_is_not_hidden_by_a_massive_one(token: int):
    """The others are a thousand times as large: of the whole tensor these differences are less than a rounding."""
    expected = np.ones((8, 64), np.float32) * 1000
    expected[token] = 1
    actual = expected.copy()
    actual[token] *= np.float32(1 + 1e-5)
    made = suite().tolerances("near").isolated("l0.attn_norm")
    assert measure(actual, expected).within(made)
    assert not measure(actual, expected, token_axis=0).within(replace(made, tokens=FLOOR))


def test_a_stage_too_few_or_too_many_is_refused_by_name():
    trace = GOLDEN.engine_outputs["transformers"].traces["far"]
    for there, said in (
        ({k: a for k, a in trace.items() if k != "l1.ffn_up"}, "l1.ffn_up"),
        ({**trace, "l0.nothing": trace["embed"]}, "l0.nothing"),
    ):
        changed = replace(GOLDEN.engine_outputs["transformers"], traces={**THEIRS.traces, "far": there})
        with refuses(ValueError, "far", "transformers", said, "reference_outputs/regenerate.py", where=MODEL):
            suite({"transformers": changed})


class Silent(NumpyRunner):
    """A runner whose passes never show one stage."""

    lost = "l1.ffn_up"

    def isolated(self, inputs: Pass, golden: Trace, observe: StageObserver) -> None:
        super().isolated(inputs, golden, self.without(observe))

    def chained(
        self, case: str, inputs: Pass, observe: StageObserver, *, n_cached: int = 0, override: StageOverride = identity
    ) -> None:
        super().chained(case, inputs, self.without(observe), n_cached=n_cached, override=override)

    def without(self, observe: StageObserver) -> StageObserver:
        def observe_unless_lost(name: str, array: np.ndarray, *, flips: int = 0, refused: int = 0) -> None:
            if name != self.lost:
                observe(name, array, flips=flips, refused=refused)

        return observe_unless_lost


@pytest.mark.parametrize("backend", ["numpy", FLOAT64])
def test_a_stage_that_never_arrives_fails_in_every_place_where_it_was_due(backend: str):
    comparisons, there = (check_runner(suite(), one) for one in (Silent(weights_of(MODEL), backend), runner(backend)))
    due = [replace(c, verdict=FAIL) for c in there if (c.stage_ref.name, c.stage_ref.layer) == ("ffn_up", 1)]
    where = [(c.mode, c.stage_ref.run, c.engine) for c in due]
    assert {mode for mode, *_ in where} == {"isolated", "chained", "decode"}
    lost = [c for c in comparisons if (c.stage_ref.name, c.stage_ref.layer) == ("ffn_up", 1)]
    assert [(c.mode, c.stage_ref.run, c.engine) for c in lost] == where
    assert {(c.verdict, c.difference.error) for c in lost} == {(FAIL, np.inf)}
    assert len(comparisons) == len(there)


class Flipping(NumpyRunner):
    """A right runner that says of every stage that values flip, and of one that some were too far off for that."""

    def isolated(self, inputs: Pass, golden: Trace, observe: StageObserver) -> None:
        def observe_with_flips(name: str, array: np.ndarray, *, flips: int = 0, refused: int = 0) -> None:
            observe(name, array, flips=3, refused=2 if name == "l1.ffn_up" else 0)

        super().isolated(inputs, golden, observe_with_flips)


def test_a_stage_with_values_too_far_off_for_a_flip_fails_though_its_numbers_are_right():
    comparisons = [c for c in RunnerCheck(suite(), Flipping(weights_of(MODEL))).stage_rows() if c.mode == "isolated"]
    assert {c.flips for c in comparisons} == {3}
    failed = [c for c in comparisons if c.verdict != PASS]
    assert {(c.stage_ref.name, c.stage_ref.layer, c.verdict) for c in failed} == {("ffn_up", 1, FAIL)}
    assert {(c.stage_ref.run, c.engine) for c in failed} == {(case, name) for case in GOLDEN.cases for name in ENGINES}
    assert all(c.difference.error <= c.tolerance.error for c in failed)
    assert_tells(failed[0].note, "2 values")


def test_every_stage_layer_case_and_cut_has_rows_of_its_own():
    comparisons = check_runner(suite({"llamacpp": THEIRS}), runner())
    stages = {(stage.name, layer) for _, stage, layer in keys(weights_of(MODEL).config)}
    for case, whole in GOLDEN.cases.items():
        n = len(whole.ids)
        decoded = [("decode", f"{case}, {k} cached") for k in (1, n // 2, n - 1)]
        for place in (("isolated", case), ("chained", case), *decoded):
            found = [(c.stage_ref.name, c.stage_ref.layer) for c in comparisons if (c.mode, c.stage_ref.run) == place]
            assert stages <= set(found)
            assert len(found) == len(set(found))


def test_distances_of_a_row_are_those_of_its_golden():
    comparisons = RunnerCheck(
        suite(with_changed_stage("near", "l0.ffn_up", lambda a: a * np.float32(1.001))), runner()
    ).stage_rows()
    mine = {
        r.mode: r
        for r in comparisons
        if (r.stage_ref.name, r.stage_ref.layer, r.stage_ref.run, r.engine) == ("ffn_up", 0, "near", "llamacpp")
    }
    stored = GOLDEN.reference.isolated["llamacpp"]["near"]["l0.ffn_up"].error
    assert np.isnan(mine["isolated"].reference_error)
    assert mine["isolated"].engine_error == stored
    assert mine["chained"].engine_error == pytest.approx(1e-3, rel=0.01)
    assert mine["chained"].difference.error == pytest.approx(1e-3, rel=0.01)
    assert 0 < mine["chained"].reference_error < 1e-6


@pytest.mark.parametrize(("engine_error", "times"), [(0.1, 1), (0.5, 2), (0.9, 3.6), (50, FACTOR)])
def test_tolerance_is_derived_or_four_times_the_engine_error(engine_error: float, times: float):
    here = weights_of(MODEL), GOLDEN.cases["near"], GOLDEN.reference.engine_output.traces["near"]
    derived = ForwardTolerances(*here)
    for mode, alone in (("isolated", derived.isolated("l1.ffn_up")), ("chained", derived.chained("l1.ffn_up"))):
        far = {(mode, "ffn_up"): Difference(engine_error * alone.error, 0.0)}
        made = getattr(ForwardTolerances(*here, distance=lambda *of, far=far: far.get(of)), mode)("l1.ffn_up")
        assert made.error == pytest.approx(times * alone.error)
        assert made.worst == pytest.approx(times * alone.worst)
        assert alone.tokens is not None
        np.testing.assert_allclose(made.tokens, times * alone.tokens)


def test_larger_engine_error_widens_the_tolerance_in_every_layer():
    stored = GOLDEN.reference.isolated
    far = {**stored["transformers"]["near"], "l0.ffn_up": Difference(1.0, 1.0)}
    isolated = {**stored, "transformers": {**stored["transformers"], "near": far}}
    truths = GOLDEN.reference, replace(GOLDEN.reference, isolated=isolated)
    before, after = (suite(reference=reference).tolerances("near") for reference in truths)
    for name, moved in (("l1.ffn_up", True), ("l1.ffn_gate", False)):
        assert (after.isolated(name).error > 1.5 * before.isolated(name).error) == moved
        assert after.chained(name) == before.chained(name)


def test_no_limit_depends_on_what_ours_computes(monkeypatch: pytest.MonkeyPatch):
    wanted = suite().tolerances("near").chained("logits")
    monkeypatch.setattr(numpy_runner, "forward", None)
    for name in ("rms_norm", "linear", "rope", "attention_scores"):
        monkeypatch.setattr(forward_page, name, None)
    made = suite().tolerances("near").chained("logits")
    assert made == wanted
    np.testing.assert_array_equal(made.tokens, wanted.tokens)


def in_four_lanes(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """A product as processors with short registers add it up; this model has no biases."""
    assert bias is None
    terms = (x[:, None] * weight).reshape(len(x), len(weight), -1, 4)
    return np.cumsum(terms, axis=2, dtype=x.dtype)[:, :, -1].sum(axis=-1, dtype=x.dtype)


def test_sums_in_another_order_pass_beside_engines_that_happen_to_be_exact(monkeypatch: pytest.MonkeyPatch):
    true = GOLDEN.reference.engine_output.traces
    rounded = {case: {name: a.astype(np.float32) for name, a in trace.items()} for case, trace in true.items()}
    exact = {name: replace(engine_output, traces=rounded) for name, engine_output in GOLDEN.engine_outputs.items()}
    nothing = dict.fromkeys(GOLDEN.reference.isolated["llamacpp"]["near"], Difference(0.0, 0.0))
    lucky = suite(exact, replace(GOLDEN.reference, isolated={p: dict.fromkeys(GOLDEN.cases, nothing) for p in ENGINES}))
    monkeypatch.setattr(forward_page, "linear", in_four_lanes)
    comparisons = check_runner(lucky, runner(OWN_SUMS))
    outputs = [c for c in comparisons if c.stage_ref.name in ("ffn_out", "attn_out")]
    assert max(c.difference.error for c in outputs) > 4e-7  # more than a rounding
    assert failing(comparisons) == set()


@pytest.mark.parametrize("stage", ["q_proj", "k_cache", "attn_norm", "embed"])
def test_float64_is_compared_only_with_the_reference(stage: str):
    comparisons = [c for c in check_runner(suite(), runner(FLOAT64)) if c.stage_ref.name == stage]
    assert {c.engine for c in comparisons} == {"transformers-float64"}
    for comparison in comparisons:
        exact = comparison.mode == "isolated" and stage in COPIES
        assert comparison.tolerance.error == (EXACT if exact else MATHEMATICS).error
        assert comparison.verdict == PASS


def test_without_reference_float32_passes_and_float64_has_no_comparisons():
    alone = suite({"llamacpp": THEIRS}, None)
    assert failing(check_runner(alone, runner())) == set()
    assert check_runner(alone, runner(FLOAT64)) == []


# Checkpoints 09 to 12.


def with_best(engine: str, token: int) -> np.ndarray:
    """The logits that the engine selected, with another token on top."""
    row = GOLDEN.engine_outputs[engine].selected_logits.copy()
    row[token] = row.max() * (1 + 1e-6) + 1e-6
    return row


@pytest.mark.parametrize("engine", ENGINES)
def test_different_best_token_of_an_engine_fails_checkpoint_10(engine: str):
    engine_output = GOLDEN.engine_outputs[engine]
    best = int(np.argmax(engine_output.selected_logits))
    other = (best + 5) % weights_of(MODEL).config.vocab_size
    comparison = sampler_rows(replace(engine_output, selected_logits=with_best(engine, other)))["argmax"]
    assert (comparison.stage_ref.checkpoint, comparison.verdict) == ("10", FAIL)
    assert comparison.note.startswith(f"token 0: expected {other}, got {best}, ")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", BUILTIN)
def test_first_greedy_token_of_an_engine_is_its_argmax(model: str, engine: str):
    engine_output = golden_of(model).engine_outputs[engine]
    assert engine_output.greedy[0] == np.argmax(engine_output.selected_logits)
    assert len(engine_output.greedy) == N_GREEDY


def with_true_gap(step: int, share: float) -> tuple[ReferenceOutput, int]:
    """The float64 reference with the two best logits of one step close together, in the same order; the second's id."""
    steps = GOLDEN.reference.step_logits.copy()
    second = int(np.argsort(steps[step])[-2])
    steps[step, second] = steps[step].max() - share * np.sqrt(np.square(steps[step]).mean())
    return replace(GOLDEN.reference, step_logits=steps), second


@pytest.mark.parametrize(("share", "verdict"), [(1e-7, TIE), (1e-4, FAIL), (1e-3, FAIL)])
def test_different_greedy_token_is_a_tie_only_at_a_reference_near_tie(share: float, verdict: str):
    reference, second = with_true_gap(5, share)
    actual = int(THEIRS.greedy[5])
    (greedy := THEIRS.greedy.copy())[5] = second
    prompt = (*GOLDEN.cases["near"].ids, *greedy[:6].tolist())
    greedy[6:] = runner().text(prompt, len(greedy) - 6)  # as an engine goes on behind its own token
    comparison = sampler_rows(replace(THEIRS, greedy=greedy), reference)["generation"]
    assert comparison.verdict == verdict
    assert comparison.note.startswith(f"token 5: expected {second}, got {actual}, ")
    n_vocab = weights_of(MODEL).config.vocab_size
    for at, token in ((5, (max(actual, second) + 1) % n_vocab), (2, int(THEIRS.greedy[2] + 1) % n_vocab), (8, second)):
        (other := greedy.copy())[at] = token  # neither of the two, or beside another step
        assert sampler_rows(replace(THEIRS, greedy=other), reference)["generation"].verdict == FAIL


def test_constant_logits_fail_if_the_reference_has_a_margin(monkeypatch: pytest.MonkeyPatch):
    right = numpy_runner.forward
    monkeypatch.setattr(numpy_runner, "forward", lambda *args, **kwargs: np.ones_like(right(*args, **kwargs)))
    comparisons = sampler_rows(THEIRS)
    assert {comparisons[stage].verdict for stage in ("selected_logits", "argmax", "generation")} == {FAIL}


@pytest.mark.parametrize(("step", "token"), [(3, -1), (3, 10**9), (-1, None)])
def test_another_token_or_one_that_the_model_does_not_have_is_no_tie(step: int, token: int | None):
    greedy = THEIRS.greedy.copy()
    greedy[step] = (greedy[step] + 1) % weights_of(MODEL).config.vocab_size if token is None else token
    assert sampler_rows(replace(THEIRS, greedy=greedy))["generation"].verdict == FAIL


@pytest.mark.parametrize("change", [lambda a: a[:0], lambda a: a[None], lambda a: a.astype(np.int32)])
def test_a_text_of_another_form_fails_and_is_no_tie(change: Callable[[np.ndarray], np.ndarray]):
    comparison = sampler_rows(replace(THEIRS, greedy=change(THEIRS.greedy)))["generation"]
    assert comparison.verdict == FAIL
    assert comparison.note.startswith(("empty: ", "shape: ", "dtype: "))


def test_a_token_less_fails_in_every_filter():
    changed = {name: array.copy() for name, array in THEIRS.probabilities.items()}
    for name in ("top_k", "top_p", "min_p", "all"):
        kept = np.flatnonzero(changed[name])
        changed[name][kept[changed[name][kept].argmin()]] = 0
    comparisons = sampler_rows(replace(THEIRS, probabilities=changed))
    failed = {name for name in changed if comparisons[f"probabilities.{name}"].verdict == FAIL}
    assert failed == {"top_k", "top_p", "min_p", "all"}


def test_every_row_says_where_it_stands_as_data():
    for comparison in check_runner(suite_of(MODEL), runner()):
        where = comparison.stage_ref
        shown = (
            comparison.stage_ref.checkpoint,
            comparison.stage_ref.name,
            comparison.stage_ref.layer,
            comparison.stage_ref.run,
        )
        assert shown == (where.checkpoint, where.name, where.layer, where.run)
        if where.stage in BY_NAME:
            assert where.key == key(comparison.stage_ref.name, comparison.stage_ref.layer)
        record: dict[str, Any] = comparison.record()
        assert "place" not in record
        assert record["stage"] == comparison.stage_ref.name


def test_decode_comparisons_fail_if_a_failed_pass_changes_the_cache(monkeypatch: pytest.MonkeyPatch):
    """A pass that is given the state itself, and not a copy, has changed it when it fails."""
    model = "micro-qwen3.5"
    golden = golden_of(model)
    near = {"near": golden.cases["near"]}
    made = ForwardExpectations(model, weights_of(model), near, golden.engine_outputs, golden.reference)
    numpy = NumpyRunner(weights_of(model))
    assert FAIL not in {c.verdict for c in RunnerCheck(made, numpy).decode_rows()}

    def shared(cache: KVCache, layer: int, right: Callable[[KVCache, int], Any] = KVCache.memory) -> Any:
        return cache._states.get(layer) or right(cache, layer)

    monkeypatch.setattr(KVCache, "memory", shared)
    bad = {c.stage_ref.name for c in RunnerCheck(made, numpy).decode_rows() if c.verdict == FAIL}
    assert {"conv_out", "delta_state", "delta_out"} <= bad


LOGITS, _ = sampler_inputs(range(8), 1000)
AHEAD = np.cumsum(np.sort(softmax(LOGITS.astype(np.float64)))[::-1])[200]  # the mass of all tokens ahead of number 201


@pytest.mark.parametrize(
    ("p", "settings", "swapped", "factor", "excused"),
    [
        (AHEAD + 1e-6, {}, False, 1.0, True),
        (AHEAD + 1e-6, {}, True, 1.0, False),  # llorch lacks it
        (AHEAD + 5.8e-6, {}, False, 1.0, True),  # 4 * 2^-24 * sqrt(2 * 1000 / 3) is 6.2e-6
        (AHEAD + 6.5e-6, {}, False, 1.0, False),
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
    assert bool(said) == excused
    if excused:
        assert_tells(said, "1 tokens", "top-p", f"{p - AHEAD:.1e}")


def test_near_tie_gap_is_the_reference_gap_to_the_less_likely_token():
    true, text = np.asarray([[4.0, 3.0, -5.0], [4.0, 3.0, -5.0]]), np.asarray([0, 1])
    known, size = Margins(true, text, 1e-6), np.sqrt(50 / 3)

    def gap(token: int, *expected: int) -> float:
        return known.of(np.asarray(expected), len(expected) - 1, token)[0]

    assert gap(0, 0) == 0
    assert gap(1, 0) == gap(0, 1) == gap(1, 1) == gap(1, 0, 0) == pytest.approx(1 / size)
    assert gap(3, 0) == gap(-1, 0) == gap(0, 1, 0) == np.inf  # no such tokens; after another text than the reference's
    assert known.of(text, 1, 0)[1] == 1e-6 + 2.0**-24
    assert NO_TIES.of(text, 0, 0) == (np.inf, 0.0)


MOVED = 1e-3


def with_gap(gap: float) -> np.ndarray:
    """Logits of two steps whose two best tokens are so far apart, in root mean squares of a row."""
    low = np.sqrt((1 + (1 - gap) ** 2 + 4) / 3)  # of a row of 1, 1 - gap, -2, whose root mean square this is
    row = np.asarray([1.0, 1.0 - gap * low, -2.0])
    return np.asarray([row, row])


@pytest.mark.parametrize(
    ("gap", "verdict"), [(0.0, TIE), (0.99 * MOVED, TIE), (1.01 * MOVED, FAIL), (5 * MOVED, FAIL), (np.nan, FAIL)]
)
def test_another_token_is_a_tie_up_to_what_rounding_moves_and_no_farther(gap: float, verdict: str):
    expected = np.asarray([0, 0])
    after: dict[tuple[int, ...], list[int]] = {(7,): [1, 1], (7, 0): [0]}  # right behind the golden's token
    runner = Mock(NumpyRunner)
    runner.name, runner.text = "numpy", lambda ids, n: np.asarray(after[ids][:n])
    tokens = GreedyJudge("m", runner, (7,), Margins(with_gap(gap), None, MOVED))
    comparison = tokens.comparison("12", "generation", "witness", tokens.text((), 2), expected)
    assert comparison.verdict == verdict
    assert_tells(comparison.note, "token 0", f"{MOVED:.1e}")


def test_flips_move_as_far_as_the_variances_of_both_tokens_say():
    logits, variances = np.asarray([[4.0, 3.0, -5.0]]), np.asarray([[1e-4, 4e-4, 9.0]])
    gap, moved = Margins(logits, None, variances).of(np.asarray([0]), 0, 1)
    assert (gap, moved) == (pytest.approx(1 / np.sqrt(50 / 3)), pytest.approx(4 * np.sqrt(1e-3) / np.sqrt(50 / 3)))
