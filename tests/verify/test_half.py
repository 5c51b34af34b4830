"""Tolerances of half precision: what they are made from, and what bounds them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planted import golden_of, weights_of
from tiny_models import random_tensors, write_folder

from llorch.builtin import BUILTIN, builtin_path
from llorch.files import open_weights
from llorch.numerics import DtypeName
from llorch.stages import keys
from llorch.verify.compare import FACTOR, FLOORS, Tolerance
from llorch.verify.goldens import HALF_DTYPES, Evidence, Tolerances
from llorch.verify.half import HalfVerifier, half_ceiling, half_tolerances
from llorch.verify.replay import Pass
from llorch.verify.truth import take_truth
from llorch.verify.verifier import ceiling

NAME = "micro-qwen3"
U = {"bfloat16": 2.0**-8, "float16": 2.0**-11}

half = pytest.mark.parametrize("dtype", HALF_DTYPES)
built_in = pytest.mark.parametrize("model", BUILTIN)


def places(tolerances: Tolerances) -> set[tuple[str, str, str]]:
    return {(c, mode, stage) for c, modes in tolerances.items() for mode in modes for stage in modes[mode]}


def judge(evidence: dict[str, Evidence], dtype: DtypeName = "bfloat16") -> HalfVerifier:
    return HalfVerifier(NAME, weights_of(NAME), golden_of(NAME).cases, evidence, golden_of(NAME).truth, dtype)


def changed(producer: str, name: str, factor: float) -> Evidence:
    arrays = golden_of(NAME).evidence[producer].arrays()
    return Evidence.from_arrays(arrays | {name: arrays[name] * np.float32(factor)})


def scaled(evidence: Evidence, factor: float) -> Evidence:
    traces = {c: {k: a * np.float32(factor) for k, a in t.items()} for c, t in evidence.traces.items()}
    return replace(evidence, traces=traces, selected_logits=evidence.selected_logits * np.float32(factor))


@half
@built_in
def test_stored_tolerances_are_of_the_same_places_as_those_of_float32(model: str, dtype: DtypeName):
    golden = golden_of(model)
    assert golden.half_tolerances.keys() == {*HALF_DTYPES} == golden.half_errors.keys()
    assert places(golden.half_tolerances[dtype]) == places(golden.tolerances)


@half
@built_in
def test_stored_tolerances_are_four_times_the_larger_stored_distance_or_the_floor(model: str, dtype: DtypeName):
    golden = golden_of(model)
    for case, modes in golden.half_tolerances[dtype].items():
        for mode, by_stage in modes.items():
            for stage, made in by_stage.items():
                if stage == "probabilities":
                    continue
                larger = max(errors[case][mode][stage] for errors in golden.half_errors[dtype].values())
                assert made.error == pytest.approx(max(4 * U[dtype], FACTOR * larger), rel=5e-3), f"{case} {stage}"


@half
@built_in
def test_stored_tolerances_stay_below_their_ceiling(model: str, dtype: DtypeName):
    golden, config = golden_of(model), weights_of(model).config
    for case, mode, stage in places(golden.tolerances) - {("near", "isolated", "probabilities")}:
        made = golden.half_tolerances[dtype][case][mode][stage]
        highest = half_ceiling(config, golden.cases[case], mode, dtype)
        assert 4 * U[dtype] <= made.error < highest.error, f"{case} {mode} {stage}"
        assert 4 * U[dtype] <= made.worst < highest.worst, f"{case} {mode} {stage}"


@half
@built_in
def test_probabilities_are_judged_as_in_float32(model: str, dtype: DtypeName):
    golden = golden_of(model)
    stored = golden.half_tolerances[dtype]["near"]["isolated"]["probabilities"]
    assert stored.error == pytest.approx(golden.tolerances["near"]["isolated"]["probabilities"].error, rel=1e-2)


@built_in
def test_transformers_is_the_farther_engine_and_float16_is_nearer_by_three_bits(model: str):
    errors = golden_of(model).half_errors
    for case in ("near", "far"):
        coarse, fine = (errors[dtype]["transformers"][case]["chained"] for dtype in HALF_DTYPES)
        assert errors["bfloat16"]["llamacpp"][case]["chained"]["block_out"] < coarse["block_out"]
        assert 5 < coarse["block_out"] / fine["block_out"] < 13


def test_ceilings_follow_from_the_number_of_roundings():
    config = weights_of(NAME).config
    n_stages = len(list(keys(config)))
    near = half_ceiling(config, Pass((1, 2, 3)), "isolated", "bfloat16")
    angle = 8 * 2 * 2.0**-23  # of position 2
    assert near == Tolerance(2.0**-4 + angle, 4 * (2.0**-4 + angle))
    chained = half_ceiling(config, Pass((1,)), "chained", "float16")
    assert chained.error == pytest.approx(2.0**-9 * n_stages**0.5)
    far = half_ceiling(config, Pass((1,), 4000), "isolated", "float16")
    assert far.error == pytest.approx(2.0**-7 + 8 * 4000 * 2.0**-23)


@half
def test_engines_without_rounding_leave_the_floor(dtype: DtypeName):
    made = judge(dict(golden_of(NAME).evidence), dtype).tolerances()
    floor = Tolerance(FLOORS[dtype], FLOORS[dtype])
    assert FLOORS[dtype] == 4 * U[dtype]
    for case, mode, stage in places(made) - {("near", "isolated", "probabilities")}:
        assert made[case][mode][stage] == floor, f"{case} {mode} {stage}"
    assert made["near"]["isolated"]["probabilities"].error < 1e-5


@half
def test_the_farther_engine_makes_the_tolerance_of_its_own_stage_only(dtype: DtypeName):
    wide = 3 * U[dtype]
    evidence = dict(golden_of(NAME).evidence) | {"transformers": changed("transformers", "near/l1.ffn_up", 1 + wide)}
    made = judge(evidence, dtype).tolerances()
    assert made["near"]["chained"]["ffn_up"].error == pytest.approx(4 * wide, rel=1e-2)
    assert made["near"]["isolated"]["ffn_up"].error == FLOORS[dtype]  # its distances are made where the engine runs
    for case, stage in (("far", "ffn_up"), ("near", "ffn_norm"), ("near", "ffn_act")):
        assert made[case]["chained"][stage].error == FLOORS[dtype]


@half
def test_a_wrong_truth_cannot_widen_a_tolerance_beyond_the_ceiling(dtype: DtypeName):
    golden = golden_of(NAME)
    verifier = judge({name: scaled(e, 1.5) for name, e in golden.evidence.items()}, dtype)
    made = verifier.tolerances()
    highest = half_ceiling(verifier.weights.config, golden.cases["near"], "chained", dtype)
    assert made["near"]["chained"]["logits"] == highest == made["near"]["chained"]["selected_logits"]
    assert highest.error < 1 / 3  # so that an engine that is right, 1/3 off from such a truth, fails


@half
def test_an_engine_that_overflows_leaves_the_tolerance_to_the_other(dtype: DtypeName):
    evidence = dict(golden_of(NAME).evidence)
    evidence["transformers"] = changed("transformers", "near/l1.ffn_out", float("inf"))
    with np.errstate(invalid="ignore"):  # our op on infinite inputs
        made = judge(evidence, dtype).tolerances()
    assert made["near"]["chained"]["ffn_out"].error == FLOORS[dtype]


def test_what_is_made_from_float32_logits_has_the_ceiling_of_float32():
    verifier = judge(dict(golden_of(NAME).evidence))
    last = int(golden_of(NAME).cases["near"].positions[-1])
    assert verifier.ceiling_of("near", "isolated", "probabilities") == ceiling("isolated", last)
    assert verifier.ceiling_of("near", "isolated", "logits").error > 100 * ceiling("isolated", last).error


def test_errors_have_three_digits_and_every_block():
    verifier = judge({"llamacpp": changed("llamacpp", "far/l1.block_out", 1.0123456)})
    errors = verifier.errors()["llamacpp"]["far"]["chained"]
    assert errors["l1.block_out"] == errors["block_out"] == pytest.approx(0.0123, rel=1e-2)
    assert errors["l0.block_out"] < 1e-3
    assert all(float(f"{error:.2e}") == error for error in errors.values())
    assert "probabilities" not in verifier.errors()["llamacpp"]["near"]["isolated"]


@pytest.mark.live
@half
def test_engines_running_now_give_nearly_the_stored_tolerances(dtype: DtypeName):
    golden = golden_of(NAME)
    said: list[str] = []
    made = half_tolerances(weights_of(NAME), golden.cases, golden.truth, builtin_path(NAME), dtype, said.append)
    assert said == [f"running llamacpp in {dtype}", f"running transformers in {dtype}"]
    for case, mode, stage in places(golden.tolerances):
        ratio = made[case][mode][stage].error / golden.half_tolerances[dtype][case][mode][stage].error
        assert 1 / FACTOR <= ratio <= FACTOR, f"{case} {mode} {stage}"


@pytest.mark.live
def test_one_engine_is_enough_where_the_other_cannot_run():
    golden = golden_of(NAME)
    path = builtin_path(NAME)
    made = half_tolerances(weights_of(NAME), golden.cases, golden.truth, path, "float16", producers=["llamacpp"])
    assert places(made) == places(golden.tolerances)
    both, one = (t["near"]["chained"]["block_out"].error for t in (golden.half_tolerances["float16"], made))
    assert one < both


@pytest.mark.live
def test_an_overflow_is_said_and_where_it_begins(tmp_path: Path):
    tensors = random_tensors("llama")
    tensors["model.layers.1.input_layernorm.weight"] *= np.float32(1e7)  # out of the range of float16, not of bfloat16
    path = write_folder(tmp_path / "large", tensors)
    weights = open_weights(path)
    said: list[str] = []
    cases = {"near": Pass((3, 1, 2))}
    with np.errstate(invalid="ignore"):
        made = half_tolerances(weights, cases, take_truth(path, cases, {}, n_greedy=1), path, "float16", said.append)
    where = "not finite from near l1.attn_norm on; tolerances are made from what is"
    assert f"transformers in float16: {where}" in said
    assert made["near"]["chained"]["logits"] == half_ceiling(weights.config, Pass((3, 1, 2)), "chained", "float16")
