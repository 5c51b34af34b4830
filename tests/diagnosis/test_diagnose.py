"""Diagnosis of whole dumps: what is right is never accused, what was planted is named, gaps and later bugs included."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import diagnoses
from builders.quantised_folders import FOLDERS
from faults.situations import MICRO
from faults.wrong_dumps import BLOCKS, WHOLE, dump_of, dump_run, everywhere, float64_weights, mistake, passes
from helpers.refusals import assert_tells
from helpers.stored_goldens import golden_of

from llorch.diagnosis.diagnose import diagnose, findings, settled
from llorch.diagnosis.dump_checker import DumpChecker
from llorch.diagnosis.expected import HALF
from llorch.diagnosis.replay import UNCHANGED, Change, Past, Replay, StageChange
from llorch.diagnosis.search.cause_search import stage_of
from llorch.diagnosis.search.hypotheses import known_mistakes, setting_families
from llorch.engines.dumps.stage_dump import Features, StageDump
from llorch.files import open_weights
from llorch.judging.goldens.forward import ENGINES
from llorch.model.cache import KVCache
from llorch.ops.rounding import ActivationKind, round_activations
from llorch.runtime.builtin import OTHERS
from llorch.stages.comparison import FAIL, PASS, ROUNDING
from llorch.stages.stage_ref import Tokens
from llorch.stages.table import keys

PLAIN = ("micro-qwen3.5-moe", "micro-ministral3", "micro-llama4")  # between them they have what other families have
MODEL, SLOW = "micro-qwen3", pytest.mark.slow
BLOCK_ENDS = ("l0.block_out", "final_norm")
MISTAKES = [each.name for each in known_mistakes(float64_weights(MODEL).config) if each.name != "cache-heads-repeated"]
OF_EACH_STAGE = {mistake(name, MODEL).stages: name for name in MISTAKES if name != "mask-hides-itself"}.values()
SAME_FROM_ZERO = {"rope-position-frozen": "rope-missing"}


@pytest.mark.slow_cases(but=[
    "micro-llama3-llamacpp-far", "micro-llama3-transformers-near", "micro-ministral3-transformers-far",
    "micro-qwen3-llamacpp-near",
])  # fmt: skip
@pytest.mark.parametrize("case", ["near", "far"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", [*MICRO, *(pytest.param(x, marks=() if x in PLAIN else SLOW) for x in OTHERS)])
def test_what_an_engine_of_others_shows_is_right(model: str, engine: str, case: str):
    this, trace = golden_of(model).cases[case], golden_of(model).engine_outputs[engine].traces[case]
    for shown in ([*trace], ["logits"], [key for key in trace if BLOCKS(key)], [key for key in trace if "l1." in key]):
        dump = StageDump.of_arrays([this], {key: trace[key] for key in shown})
        results = list(DumpChecker(Replay(float64_weights(model), dump)).results())  # findings come of what is not PASS
        assert {result.verdict for result in results} == {PASS}
        assert {result.key for result in results} == {*shown}
        assert max(result.over for result in results) < 1


@pytest.mark.parametrize("model", [MODEL, PLAIN[0]])
def test_diagnose_of_a_right_dump_has_every_stage_and_no_finding(model: str):
    this, trace = golden_of(model).cases["near"], golden_of(model).engine_outputs["llamacpp"].traces["near"]
    found = diagnose(float64_weights(model), StageDump.of_arrays([this], dict(trace)))
    assert (found.is_right, found.findings) == (True, [])
    assert {result.key for result in found.results} == {*trace}


def test_a_failed_check_becomes_rounding_only_by_a_finding_of_rounding():
    checks = diagnoses.results(diagnoses.config(), {"l0.q_proj": 5, "l1.ffn_act": 5})
    verdicts = {check.key: check.verdict for check in checks}
    assert {key for key, verdict in verdicts.items() if verdict == FAIL} == {"l0.q_proj", "l1.ffn_act"}
    settled_checks = settled(checks, [diagnoses.finding("l0.q_proj"), diagnoses.finding("l1.ffn_act", "rounding")])
    assert {check.key: check.verdict for check in settled_checks} == verdicts | {"l1.ffn_act": ROUNDING}


@pytest.mark.parametrize("first", [0, 1], ids=["every-key", "keys-of-the-past"])
def test_the_cache_beside_a_dump_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch, first: int):
    dump, right = dump_run(MODEL, passes(MODEL, 5, 7)), KVCache.append

    def append(self: KVCache, layer: int, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        keys, values = right(self, layer, k, v)
        return np.concatenate([keys[:, : -len(k)] * 0, keys[:, -len(k) :] * first], axis=1), values

    monkeypatch.setattr(KVCache, "append", append)
    found = list(findings(float64_weights(MODEL), dump))
    assert (found[0].kind != "rounding", found[0].key, found[0].n_pass) == (True, "l0.k_cache", first)


@pytest.mark.slow_cases(
    but=["cache-keys-before-rope", "embedding-from-lm-head", "norm-gain-of-other-norm", "qkv-fused-per-group"]
)
@pytest.mark.parametrize(  # no engine could go on with a cache of repeated heads
    "name", [pytest.param(name, marks=() if name in OF_EACH_STAGE else SLOW) for name in MISTAKES]
)
def test_injected_mistake_is_named_from_a_complete_dump(name: str):
    model, injected = MODEL, mistake(name, MODEL)
    tokens = passes(model, 5, 7) if injected.after_cached else passes(model)
    places = injected.select_keys(tuple(f"l{layer}.{stage}" if stage not in ("embed", "final_norm", "logits") else stage
                               for layer in range(float64_weights(model).config.n_layers)
                               for stage in injected.stages))  # fmt: skip
    first, *_ = findings(float64_weights(model), dump_run(model, tokens, injected.change(places), WHOLE))
    assert SAME_FROM_ZERO.get(name, name) == first.causes[0].name
    assert stage_of(first.key) in injected.stages
    assert first.causes[0].explained_share > 0.7


@pytest.mark.slow_cases("rope-interleaved-pairs-l0.block_out-also0")
@pytest.mark.parametrize(
    ("name", "first", "also"),
    [
        ("rope-interleaved-pairs", "l0.block_out", set()),
        pytest.param("norm-eps-1e-5-for-1e-6", "l0.block_out", {"norm-eps"}, marks=SLOW),
        pytest.param("swiglu-gelu", "l0.block_out", set(), marks=SLOW),
        pytest.param("ffn-gate-and-up-swapped", "l0.block_out", {"swiglu-silu-on-up"}, marks=SLOW),
        ("cache-keys-before-rope", "l0.block_out", {"rope-missing"}),
        ("logits-soft-capped", "logits", {"soft-cap"}),
    ],
)
def test_blocks_alone_name_it_too_and_say_what_they_cannot_tell_apart(name: str, first: str, also: set[str]):
    injected = mistake(name, MODEL)
    inside = (f"l{layer}.{stage}" for layer in (0, 1) for stage in injected.stages)
    places = ("logits",) if "logits" in injected.stages else tuple(inside)
    (found,) = findings(float64_weights(MODEL), dump_run(MODEL, passes(MODEL), injected.change(places), BLOCKS))
    assert (found.key, found.kind) == (first, "mistake")
    assert {name, *also} <= {each.name for each in (*found.causes, *found.alternatives)}


@pytest.mark.nightly_cases(but=["<lambda>0-norm-eps-3e-06-3e-06-places0", "<lambda>0-soft-cap-37.0-37-places4"])
@pytest.mark.parametrize(
    ("family", "value", "value_text", "places"),
    [
        ("norm-eps", 3e-6, "3e-06", ()),
        ("rope-theta", 123456.0, "123456", ()),
        ("rope-position-offset", 7, "7", ()),
        ("scores-scale", 0.1, "0.1", ("l0.attn_scores", "l1.attn_scores")),
        ("soft-cap", 37.0, "37", ("logits",)),
        ("mask-window", 6, "6", ("l0.attn_scores", "l1.attn_scores")),
        ("scaled", 1.7, "1.7", ("l0.attn_out", "l1.attn_out")),
        ("weights-of-other-layer", 0, "layer 0", ("l1.v_proj",)),
    ],
)
@pytest.mark.parametrize("is_dumped", [WHOLE, pytest.param(BLOCKS, marks=SLOW)])
def test_a_value_is_recovered(family: str, value: float, value_text: str, places: tuple[str, ...], is_dumped: Any):
    if is_dumped is BLOCKS and family == "rope-position-offset":
        is_dumped = lambda key: key.endswith("k_rope")  # noqa: E731 (scores do not show it, nor what is behind them)
    known = next(each for each in setting_families(float64_weights(MODEL).config) if each.name == family)
    change = known.hypothesis(value).change(places)
    found, *_ = findings(float64_weights(MODEL), dump_run(MODEL, passes(MODEL), change, is_dumped))
    assert value_text in [each.value for each in (*found.causes, *found.alternatives)]


@pytest.mark.slow
def test_a_second_mistake_behind_the_first_is_found_in_the_same_run():
    first, second = mistake("rope-interleaved-pairs", MODEL), mistake("swiglu-gelu", MODEL)
    plants = {
        **first.change(("l0.q_rope", "l1.q_rope")).replaced_stages,
        **second.change(("l0.ffn_act", "l1.ffn_act")).replaced_stages,
    }
    whole = findings(float64_weights(MODEL), dump_run(MODEL, passes(MODEL), Change(plants)))
    assert [found.causes[0].name for found in whole] == ["rope-interleaved-pairs", "swiglu-gelu"]
    (pair,) = findings(float64_weights(MODEL), dump_run(MODEL, passes(MODEL), Change(plants), BLOCKS))
    assert {each.name for each in pair.causes} == {"rope-interleaved-pairs", "swiglu-gelu"}
    assert pair.layers == (0, 1)


def test_what_is_none_of_the_known_is_local_and_has_no_name():
    change = StageChange(lambda inputs, stage, array: array * (1 + 0.01 * np.sin(np.arange(array.shape[-1]))))
    found = diagnose(float64_weights(MODEL), dump_run(MODEL, passes(MODEL), Change({"l1.v_proj": change})))
    (finding,) = found.findings
    assert (finding.kind, finding.key) == ("unknown", "l1.v_proj")
    assert (finding.starts_in, finding.causes) == (("l1.v_proj",), ())
    assert_tells(finding.sentence, "l1.v_proj")
    behind = next(result for result in found.results if result.key == "l1.block_out")
    assert behind.chained is not None
    assert behind.isolated.difference.error < 1e-6 < behind.chained.difference.error  # inherited, not made there


def test_near_miss_is_the_best_attempt_of_its_name():
    wrong = mistake("norm-root-missing", MODEL).change(norms := ("l0.q_norm", "l0.k_norm")).replaced_stages
    noise = StageChange(lambda inputs, stage, array: array * (1 + 0.1 * np.sin(np.arange(array.shape[-1]))))
    change = Change({**wrong, "l0.attn_scores": noise})
    dump = dump_run(MODEL, passes(MODEL), change, lambda key: key in ("l0.attn_norm", "l0.attn_scores"))
    nearest = next(findings(float64_weights(MODEL), dump)).near_misses[0]  # in one of the two norms it explains 0.65
    assert (nearest.name, nearest.stages, nearest.explained_share > 0.9) == ("norm-root-missing", norms, True)


def test_numbers_that_are_far_too_small_do_not_widen_their_own_tolerance():
    small = Change({"l1.v_proj": StageChange(lambda inputs, stage, array: array * 1e-3)})
    right, wrong = (
        next(
            check.isolated
            for check in DumpChecker(Replay(float64_weights(MODEL), dump)).results()
            if check.key == "l1.v_proj"
        )
        for dump in (dump_run(MODEL, passes(MODEL), Change({})), dump_run(MODEL, passes(MODEL), small))
    )
    assert wrong.tolerance.error == right.tolerance.error
    np.testing.assert_array_equal(wrong.tolerance.tokens, right.tolerance.tokens)


def test_one_wrong_token_is_said():
    def wrong(inputs: Any, stage: str, array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[5] += 1
        return array

    (finding,) = findings(
        float64_weights(MODEL), dump_run(MODEL, passes(MODEL), Change({"l0.ffn_up": StageChange(wrong)}))
    )
    assert finding.pattern == "position 5 only: the right values plus 1"
    assert finding.sentence.startswith(f"l0.ffn_up: {finding.pattern}. ")


@pytest.mark.parametrize(("dtype", "declared"), [("bfloat16", False), ("float16", True)])
def test_half_precision_is_rounding_and_its_mistakes_are_named_all_the_same(dtype: str, declared: bool):
    kind: ActivationKind = HALF[dtype]
    rounded = StageChange(lambda inputs, stage, array: round_activations(np.ascontiguousarray(array), kind))
    half = {
        key: rounded
        for key, stage, _ in keys(float64_weights(MODEL).config)
        if stage.name not in ("embed", "attn_scores")
    }
    features = Features(dtype=dtype) if declared else Features()
    right = replace(dump_run(MODEL, passes(MODEL), Change(half)), features=features)
    (finding,) = findings(float64_weights(MODEL), right)
    assert finding.kind == "rounding"
    assert_tells(finding.sentence, dtype)
    turned = mistake("rope-interleaved-pairs", MODEL).change(("l0.q_rope", "l0.k_rope", "l1.q_rope", "l1.k_rope"))
    wrong, *_ = findings(
        float64_weights(MODEL), dump_run(MODEL, passes(MODEL), Change({**half, **turned.replaced_stages}))
    )
    assert wrong.causes[0].name == "rope-interleaved-pairs"


def test_a_cache_in_half_and_rounded_inputs_explain_what_nobody_declared():
    cache = StageChange(lambda i, s, array: round_activations(np.ascontiguousarray(array), "F16"))
    places = [f"l{layer}.{stage}" for layer in (0, 1) for stage in ("k_cache", "v_cache")]
    dump = dump_run(MODEL, passes(MODEL), Change(dict.fromkeys(places, cache)), lambda key: "cache" not in key)
    (found,) = findings(float64_weights(MODEL), dump)
    assert (found.kind, found.causes[0].name) == ("rounding", "cache-in-float16")


def test_what_a_dump_cannot_show_is_said_with_the_reason():
    short = diagnose(
        float64_weights("micro-llama3"), dump_run("micro-llama3", passes("micro-llama3", 1))
    ).could_not_show
    by_name = {name: reason for reason, names_ in short.items() for name in names_}
    assert_tells(by_name["cache-past-forgotten"], "one", "pass")
    assert_tells(by_name["rope-interleaved-pairs"], "rounding", "1 tokens", "position 0")
    upper = diagnose(
        float64_weights(MODEL), dump_run(MODEL, passes(MODEL), is_dumped=lambda key: key in ("embed", "l0.attn_norm"))
    )
    by_name = {name: reason for reason, names_ in upper.could_not_show.items() for name in names_}
    assert_tells(by_name["swiglu-gelu"], "stage")


def test_decoding_mistake_that_the_embedding_shows_is_detectable():
    weights = open_weights(FOLDERS / "mlx-4bit").astype(np.float64)
    dump = dump_of(weights, [Tokens((3, 11, 7), 0)], UNCHANGED, lambda key: key == "embed")
    hidden = {name for names in diagnose(weights, dump).could_not_show.values() for name in names}
    assert "mlx-bias-dropped" not in hidden
    assert "rope-missing" in hidden


def test_error_of_one_expert_is_located_by_its_number():
    model = "micro-qwen3-moe"
    ids = dump_run(model, passes(model)).dumped[0, "l0.topk_ids"].read()

    def wrong(inputs: Any, stage: str, array: np.ndarray) -> np.ndarray:
        return np.where((ids == 4)[..., None], 0.7 * array, array)

    (finding,) = findings(
        float64_weights(model), dump_run(model, passes(model), Change({"l0.expert_up": StageChange(wrong)}))
    )
    assert finding.pattern == "expert 4 only: 0.7 times the right values"


def test_columns_missing_in_a_tied_head_are_described():
    model = "micro-qwen2"
    weights = float64_weights(model)

    def half(inputs: Any, stage: str, array: np.ndarray) -> np.ndarray:
        return inputs.arrays["final_norm"][:, :32] @ np.asarray(inputs.weights["embed_tokens"])[:, :32].T

    (finding,) = findings(weights, dump_run(model, passes(model), Change({"logits": StageChange(half)})))
    assert finding.pattern == "input columns from 32 on are left out"


def test_values_that_are_not_finite_are_described_and_not_explained():
    def overflowing(inputs: Any, stage: str, array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[2, 5] = np.inf
        return array

    dump = dump_run(MODEL, passes(MODEL), Change({"l0.ffn_act": StageChange(overflowing)}))
    first = next(findings(float64_weights(MODEL), dump))
    assert (first.kind, first.key, first.causes, first.near_misses) == ("not finite", "l0.ffn_act", (), ())
    assert first.sentence.endswith("; its inputs are finite.")
    assert_tells(first.sentence, "infinity", "1 of 2688", "position 2", "column 5")


def test_cached_rows_before_the_dump_are_said_to_be_taken_as_given():
    weights = float64_weights(MODEL)
    whole = dump_run(MODEL, passes(MODEL, 8, 1))
    step = {(0, key): array for (n_pass, key), array in whole.dumped.items() if n_pass == 1}
    diagnosis = diagnose(weights, replace(whole, passes=whole.passes[1:], dumped=step, n_before=8))
    assert (diagnosis.is_right, diagnosis.n_unchecked) == (True, 8)
    assert diagnosis.unchecked_rows == "rows 0 to 7 of the caches were taken as given"
    assert diagnose(weights, whole).unchecked_rows == ""


def test_a_nan_that_spreads_is_no_overflow_of_a_known_mistake():
    model, right = "micro-qwen3.5", ("embed", "l0.attn_norm", "l0.conv_out", "l0.q_l2", "l0.k_l2", "l0.beta")
    shown = (*right, "l0.delta_out", "l0.attn_residual")
    dump = dump_run(model, passes(model), is_dumped=lambda key: key in shown)
    nan = {at: replace(array, read=lambda a=array: a.read() * np.float32(np.nan)) for at, array in dump.dumped.items()}
    finite = {(0, name): dump.dumped[0, name] for name in right}
    (found,) = findings(float64_weights(model), replace(dump, dumped=nan | finite))
    assert (found.kind, found.key, found.causes) == ("not finite", "l0.delta_out", ())


@pytest.mark.parametrize(
    "dumped_keys",
    [("l0.block_out", "l1.attn_context", "l1.ffn_norm", "l1.block_out"), pytest.param(BLOCK_ENDS, marks=SLOW)],
)
def test_a_layer_that_was_skipped_is_named(dumped_keys: tuple[str, ...]):
    last = everywhere(mistake("block-skipped", MODEL), float64_weights(MODEL)).replaced_stages["l1.block_out"]
    dump = dump_run(MODEL, passes(MODEL), Change({"l1.block_out": last}), lambda key: key in dumped_keys)
    (found,) = findings(float64_weights(MODEL), dump)
    assert (found.key, found.causes[0].name) == (dumped_keys[-1], "block-skipped")


def test_mistake_that_another_pass_refutes_is_not_named():
    missing = everywhere(mistake("rope-missing", MODEL), float64_weights(MODEL))
    right, turned = (dump_run(MODEL, passes(MODEL, 5, 7), change) for change in (UNCHANGED, missing))
    at = [(n_pass, "l0.q_rope") for n_pass in (0, 1)]
    noise = np.random.default_rng(0).standard_normal(right.dumped[at[1]].read().shape).astype(np.float32)
    wrong = {at[0]: turned.dumped[at[0]], at[1]: replace(right.dumped[at[1]], read=lambda: noise)}
    right_arrays = {key: array for key, array in right.dumped.items() if key[1] in ("embed", "l0.q_norm")}
    (finding,) = findings(float64_weights(MODEL), replace(right, dumped=right_arrays | wrong))
    assert (finding.kind, finding.n_pass) == ("unknown", 0)
    assert "rope-missing" not in repr(finding)


def test_passes_with_the_error_are_told_from_right_ones():
    turned = everywhere(mistake("rope-interleaved-pairs", MODEL), float64_weights(MODEL))
    plan = passes(MODEL, 8, 1, 1)
    right, wrong = (dump_run(MODEL, plan, change, lambda key: "q_" in key) for change in (UNCHANGED, turned))
    arrays = {key: (right if key[0] else wrong).dumped[key] for key in right.dumped}
    finding = next(findings(float64_weights(MODEL), replace(right, dumped=arrays)))
    assert [cause.name for cause in finding.causes] == ["rope-interleaved-pairs"]
    assert finding.sentence.endswith("Wrong in pass 0 of 3 only (8 tokens); the steps are right.")


def test_prompt_that_was_read_wrongly_is_named_from_a_right_step():
    weights, plan = float64_weights(MODEL), passes(MODEL, 8, 1)
    replay = Replay(weights, StageDump.of_arrays(plan))
    past, step = Past(replay.config, np.float64), dict[str, np.ndarray]()
    turned = everywhere(mistake("rope-interleaved-pairs", MODEL), weights)
    replay.run(0, lambda name, array: None, past, turned, fed=False)
    replay.run(1, step.__setitem__, past.next(), fed=False)
    step_arrays = {
        key: step[key].astype(np.float32) for key in ("embed", "l0.q_rope", "l0.attn_context", "l0.block_out")
    }
    (finding,) = findings(weights, StageDump.of_arrays(plan, {}, step_arrays))
    assert (finding.key, [cause.name for cause in finding.causes]) == ("l0.attn_context", ["rope-interleaved-pairs"])
    assert "before pass 1 only" in finding.sentence


def test_one_wrong_function_is_one_finding():
    weights = float64_weights(MODEL)
    rows = {key: stage for key, stage, _ in keys(weights.config)}

    def wrong(inputs: Any, stage: str, array: np.ndarray) -> np.ndarray:
        return array + 0.01 * np.roll(array, 1, axis=-1)

    for ending, scope in (("_rope", "rotation"), ("norm", "norm"), ("_proj", "")):
        change = Change({key: StageChange(wrong) for key, stage in rows.items() if stage.name.endswith(ending)})
        run_findings = diagnose(weights, dump_run(MODEL, passes(MODEL), change)).findings
        assert len(run_findings) == (1 if scope else 3)  # three of seven products are wrong: no one function is
        assert not scope or f"The same in every {scope}: look for one cause." in run_findings[0].sentence


@pytest.mark.parametrize(
    ("name", "model", "fact"),
    [("norm-gain-plus-one", "micro-qwen3.5", "Qwen3.5"), ("rope-base-1e4", "micro-llama3", "scaling")],
)
def test_the_sentence_of_a_mistake_is_true_of_the_family(name: str, model: str, fact: str):
    assert_tells(mistake(name, model).sentence, fact)
