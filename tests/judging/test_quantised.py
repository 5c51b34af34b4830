"""Verification under ggml numerics; the live part runs llama.cpp on files of all three families."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.tiny_models import random_tensors, write_folder
from helpers.refusals import assert_tells, refuses

import llorch
from llorch.engines import LoadPath, open_engine
from llorch.engines.process import in_child
from llorch.files import Weights, matrix, open_weights
from llorch.judging.compare import compare_exact
from llorch.judging.expectations import files
from llorch.judging.expectations.forward import ForwardExpectations
from llorch.judging.expectations.quantised_models import write_model
from llorch.judging.goldens.forward import EngineOutput
from llorch.judging.runner_check import RunnerCheck
from llorch.judging.runners.numpy import EDGE, GgmlRunner, describe_rounding, replace_flips, rounded_stages, run
from llorch.judging.types import Comparison
from llorch.judging.verify import verify_ggml
from llorch.model.blocks import forward
from llorch.model.model import Model
from llorch.ops.numerics import GGML, Numerics
from llorch.ops.rounding import BLOCK_SIZE, round_activations
from llorch.runtime.builtin import builtin_path
from llorch.stages.comparison import FAIL, PASS, TIE
from llorch.stages.stage_ref import Pass, StageRef
from llorch.stages.table import CHECKPOINTS

IDS = [5, 17, 33, 60, 2, 42, 8, 90, 71, 29]
F16_CACHE = Numerics("ggml", "f16")
TYPE = r"\b(?:F16|Q\w+)\b"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model(folder: Path, name: str, numerics: Numerics = GGML, residency: str = "decoded") -> Model:
    path = folder / f"{name}.gguf"
    return llorch.load(path if path.exists() else write_model(name, folder), numerics=numerics, residency=residency)  # type: ignore[arg-type]


def compare(folder: Path, name: str, numerics: Numerics = GGML, residency: str = "decoded") -> list[Comparison]:
    return list(verify_ggml(model(folder, name, numerics, residency), IDS))


@pytest.mark.live
@pytest.mark.parametrize("numerics", [GGML, F16_CACHE], ids=str)
@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q5_1", "IQ4_NL", "Q4_K_M", "MXFP4"])
def test_every_stage_of_a_stored_file_agrees_with_llama_cpp_running_it(folder: Path, name: str, numerics: Numerics):
    comparisons = compare(folder, name, numerics)
    assert [c for c in comparisons if c.verdict == FAIL] == []
    expected = {number for number in CHECKPOINTS if number < "14"} - {"05b", "06b"}
    assert {c.stage_ref.checkpoint for c in comparisons} == expected
    (selected,) = (c for c in comparisons if c.stage_ref.checkpoint == "09")
    within = selected.difference.within(selected.tolerance)
    assert (selected.verdict == PASS) == within  # what passes needs no excuse
    products = [c for c in comparisons if c.stage_ref.name in ("q_proj", "ffn_out", "logits") and c.mode == "isolated"]
    assert max(c.difference.error for c in products) ** 2 <= 1e-12


@pytest.mark.live
def test_packed_residency_has_no_failed_comparison(folder: Path):
    assert not [c for c in compare(folder, "Q4_K_M", residency="packed") if c.verdict == FAIL]


WRONG: dict[str, Callable] = {
    "inputs are not rounded": lambda x, kind: x,
    "rounded to the wrong type": lambda x, kind: round_activations(x, "Q8_0" if kind == "Q8_K" else "F16"),
    "another variant of rounding": lambda x, kind: np.trunc(x * 64) / 64,
}


@pytest.mark.live
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_rounding_goes_red_at_the_first_product(folder: Path, monkeypatch: pytest.MonkeyPatch, wrong: str):
    monkeypatch.setattr(matrix, "round_activations", WRONG[wrong])
    failing = [c for c in compare(folder, "Q4_K_M") if c.verdict == FAIL]
    assert {c.stage_ref.name for c in failing if c.mode == "isolated"} >= {"q_proj", "attn_out", "ffn_out", "logits"}
    assert max(c.difference.error / c.tolerance.error for c in failing if c.tolerance.error) > 100


@pytest.mark.live
def test_compared_tokens_end_before_the_last_greedy_token(folder: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[Mapping] = []

    def judge(name: str, weights: Weights, cases: Mapping, engine_outputs: Mapping, _: None, *, n_prompt: int) -> None:
        assert n_prompt == len(IDS)
        seen.extend((cases, engine_outputs))
        raise KeyboardInterrupt

    monkeypatch.setattr("llorch.judging.verify.ForwardExpectations", judge)
    with pytest.raises(KeyboardInterrupt):
        list(verify_ggml(model(folder, "F16"), IDS))
    cases, engine_outputs = seen
    greedy = engine_outputs["llamacpp"].greedy
    assert len(greedy) > 1
    assert cases["near"].ids == (*IDS, *greedy[:-1].tolist())


@pytest.mark.live
def test_matrices_of_several_tiles_are_decoded_as_ggml_does_and_counted_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("llorch.files.packed.TILE", 5 * 256)
    weights = model(folder, "Q8_0").weights
    assert {c.verdict for c in files.decode_rows("m", weights)} == {PASS}
    monkeypatch.setattr(files, "in_child", lambda *args: in_child(*args)[::-1])
    (comparison,) = files.decode_rows("m", weights)
    assert (comparison.stage_ref.name, comparison.verdict, comparison.difference.error) == ("decode.Q8_0", FAIL, 1.0)


@pytest.mark.live
def test_llama_cpp_rounds_for_a_file_only(tmp_path: Path):
    place = write_folder(tmp_path, random_tensors("llama"))
    with refuses(ValueError, "GGUF", "llorch convert", where=place):
        open_engine("llamacpp", place, numerics=GGML)


@pytest.mark.live
def test_flips_are_counted_and_what_they_would_do_is_said(folder: Path):
    comparisons = compare(folder, "BF16")
    (near,) = (c for c in comparisons if (c.stage_ref.name, c.mode, c.stage_ref.run) == ("logits", "free", "near"))
    flips = sum(c.flips for c in comparisons if (c.mode, c.stage_ref.run) == ("chained", "near"))
    assert_tells(near.note, f"{flips} values", f"{near.difference.error:.1e}")
    assert flips > 0


def suite(
    folder: Path, ids: Sequence[int], n_greedy: int, change: Callable[[np.ndarray], np.ndarray] = lambda logits: logits
) -> tuple[ForwardExpectations, GgmlRunner]:
    """One whose golden is our own pass, but for its logits; their best tokens are its greedy text."""
    weights, case = model(folder, "Q8_0").weights, Pass(tuple(ids))
    trace = run(weights, case)
    trace["logits"] = change(trace["logits"].copy())
    greedy = trace["logits"][-n_greedy:].argmax(axis=-1)
    route = LoadPath("us", "us")
    shown = EngineOutput({"near": trace}, trace["logits"][-1], probabilities={}, greedy=greedy, load_path=route)
    n_prompt = len(ids) + 1 - n_greedy
    made = ForwardExpectations("m", weights, {"near": case}, {"llamacpp": shown}, None, n_prompt=n_prompt)
    return made, GgmlRunner(weights, {"near": trace}, {"near": made.tolerances("near")})


@pytest.mark.parametrize(
    ("divisor", "selected", "ties"), [(1, 1, True), (1.01, 1, False), (1, 1.001, True), (1, 2, False)]
)
def test_only_flips_between_two_runs_of_llama_cpp_excuse_a_failure(folder: Path, divisor, selected, ties):
    made, runner = suite(folder, IDS, 1, lambda logits: logits / np.float32(divisor))
    row = runner.last_row(made.cases["near"])
    shown = replace(made.engine_outputs["llamacpp"], selected_logits=row * np.float32(selected))
    for checkpoint in ("09", "10"):
        failed = compare_exact(StageRef(checkpoint, "argmax"), "llamacpp", 1.0, "said before", model="m")
        comparison = RunnerCheck(made, runner)._allow_batch_result(failed, row, shown)
        assert comparison.verdict == (TIE if ties else FAIL)
        assert comparison.note.startswith("said before")
        assert ("llama.cpp" in comparison.note) == ties


@pytest.mark.parametrize(("share", "verdict"), [(0.95, TIE), (1.05, FAIL)])
def test_two_runs_of_llama_cpp_may_be_apart_as_far_as_flips_move_them_and_no_farther(
    folder: Path, share: float, verdict: str
):
    made, runner = suite(folder, IDS, 1)
    row, most = runner.last_row(made.cases["near"]), made.tolerances("near").free_last_row()
    selected = row * (1 + share * min(most.error, most.worst))  # as far off in every number
    shown = replace(made.engine_outputs["llamacpp"], selected_logits=selected.astype(row.dtype))
    failed = compare_exact(StageRef("09", "selected_logits"), "llamacpp", 1.0, "", model="m")
    assert RunnerCheck(made, runner)._allow_batch_result(failed, row, shown).verdict == verdict


def test_the_last_row_is_computed_in_one_pass(folder: Path, monkeypatch: pytest.MonkeyPatch):
    passes: list[list[int]] = []

    def record_pass(ids: np.ndarray, *args: Any, **options: Any) -> np.ndarray:
        passes.append(ids.tolist())
        return forward(ids, *args, **options)

    expectations, runner = suite(folder, IDS, 1)
    monkeypatch.setattr("llorch.judging.runners.numpy.forward", record_pass)
    runner.last_row(expectations.cases["near"])
    assert passes == [IDS]


@pytest.mark.parametrize(("margin", "verdict"), [(-1.0, PASS), (1e-3, TIE), (1.0, FAIL)])
def test_our_text_runs_free_and_another_token_must_be_explained_by_flips(folder: Path, margin: float, verdict: str):
    """The golden finds the second best token better than ours by `margin`, in root mean squares of its logits."""

    def prefer(logits: np.ndarray) -> np.ndarray:
        other, best = logits[-1].argsort()[-2:]
        if margin > 0:
            logits[-1, other] = logits[-1, best] + np.float32(margin) * np.sqrt(np.square(logits[-1]).mean())
        return logits

    _, runner = suite(folder, IDS, 1)
    made, runner = suite(folder, [*IDS, *runner.text(IDS, 1).tolist()], 2, prefer)
    (comparison,) = (c for c in RunnerCheck(made, runner).sampler_rows() if c.stage_ref.name == "generation")
    assert comparison.verdict == verdict
    assert comparison.note.startswith("token 1: expected") == (margin > 0)


def test_float64_forward_stays_float64_through_quantised_matrices(folder: Path):
    made = model(folder, "Q8_0")
    wide = Model(made.weights.astype(np.float64)).forward(IDS)
    narrow = made.forward(IDS)
    assert wide.dtype == np.float64
    assert np.any(wide != narrow.astype(np.float64))
    assert wide.astype(np.float32).astype(np.float64).tolist() != wide.tolist()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q8_1", "Q8_K"])
def test_a_value_on_the_edge_of_two_codes_is_replaced_and_counted(kind):
    golden = np.random.default_rng(1).normal(0, 1, (300, 2048)).astype(np.float32)
    ours = (golden * (1 + 1e-6 * np.random.default_rng(2).uniform(-1, 1, golden.shape))).astype(np.float32)
    mixed, n_flips, n_refused = replace_flips(ours, golden, kind, np.abs(golden) * 2e-6)
    assert n_flips > 0
    assert n_refused == 0
    apart = np.abs(round_activations(mixed, kind) - round_activations(golden, kind))
    assert apart.max() <= EDGE * np.abs(golden).max()
    assert np.abs(round_activations(ours, kind) - round_activations(golden, kind)).max() > 1e-4
    blocks = [array.reshape(-1, BLOCK_SIZE.get(kind, 1)) for array in (mixed, ours, golden)]
    kept, taken = ((blocks[0] == other).all(axis=-1) for other in blocks[1:])
    assert (kept | taken).all()
    assert 0 < (~kept).sum() <= n_flips  # only blocks with a flip are replaced


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q8_1", "Q8_K"])
@pytest.mark.parametrize("wrong", [0.0, 1.001, np.nan])
def test_a_value_that_was_wrong_before_it_was_rounded_stays_ours(kind, wrong: float):
    golden = np.random.default_rng(1).normal(0, 1, (3, 2048)).astype(np.float32)
    ours = golden * np.float32(wrong)
    mixed, n_flips, n_refused = replace_flips(ours, golden, kind, np.abs(golden) * 1e-5)
    assert n_flips == 0 < n_refused
    np.testing.assert_array_equal(mixed, ours)


def test_equal_values_have_no_flips_and_nothing_is_replaced():
    x = np.random.default_rng(1).normal(0, 1, (3, 512)).astype(np.float32)
    same, *counts = replace_flips(x, x.copy(), "Q8_K", np.zeros_like(x))
    assert counts == [0, 0]
    assert same is x


def test_which_stages_are_rounded_follows_from_types_and_cache(folder: Path):
    stages = rounded_stages(model(folder, "Q4_K_M").weights)
    assert stages["l0.attn_norm"] == stages["final_norm"] == {"Q8_K"}
    assert "l0.q_rope" not in stages
    half = rounded_stages(model(folder, "Q4_K_M", F16_CACHE).weights)
    names = ("q_rope", "k_rope", "v_proj", "attn_probs")
    rounded_by_the_cache = {f"l{layer}.{name}" for layer in (0, 1) for name in names}
    assert half.keys() - stages.keys() == rounded_by_the_cache
    assert all(half[name] == {"F16"} for name in rounded_by_the_cache)
    assert rounded_stages(llorch.load("story", numerics=GGML).weights) == {}


def test_the_rounding_is_named(folder: Path):
    assert re.findall(TYPE, describe_rounding(model(folder, "Q4_K_M").weights)) == ["Q4_K", "Q6_K", "Q8_K"]
    inputs, cache = describe_rounding(model(folder, "Q8_0", F16_CACHE).weights).split("; ")
    assert (re.findall(TYPE, inputs), re.findall(TYPE, cache)) == (["Q8_0", "Q8_0"], ["F16", "F16"])
    assert_tells(cache, "cache", "queries", "probabilities")
    assert describe_rounding(open_weights(builtin_path("story"))) == ""
