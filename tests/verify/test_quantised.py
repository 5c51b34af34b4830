"""Verification under ggml numerics; the live part runs llama.cpp on files of all three families."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llorch.verify.quantised import EDGE, QuantisedVerifier, adopt_edges, emulated, rounded_stages
from llorch.verify.verifier import FAIL, PASS, TIE, Row, exact_row, run
from tiny_models import random_tensors, write_folder

import llorch
from llorch.builtin import builtin_path
from llorch.files import Weights, matrix, open_weights
from llorch.model import Model
from llorch.numerics import GGML, Numerics
from llorch.ops.rounding import BLOCK_SIZE, round_activations
from llorch.verify import forward as verify
from llorch.verify.compare import EXACT
from llorch.verify.goldens import Evidence
from llorch.verify.limits import limit, variances
from llorch.verify.models import verify_as_stored
from llorch.verify.places import Pass
from llorch.verify.suites.quantised_models import write_model
from llorch.verify.witnesses import open_producer
from llorch.verify.witnesses.process import in_child

IDS = [5, 17, 33, 60, 2, 42, 8, 90, 71, 29]
F16_CACHE = Numerics("ggml", "f16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model(folder: Path, name: str, numerics: Numerics = GGML, residency: str = "decoded") -> Model:
    path = folder / f"{name}.gguf"
    return llorch.load(path if path.exists() else write_model(name, folder), numerics=numerics, residency=residency)  # type: ignore[arg-type]


def judged(folder: Path, name: str, numerics: Numerics = GGML, residency: str = "decoded") -> list[Row]:
    pytest.importorskip("llama_cpp")
    return list(verify_as_stored(model(folder, name, numerics, residency), IDS))


@pytest.mark.live
@pytest.mark.parametrize("numerics", [GGML, F16_CACHE], ids=str)
@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q5_1", "IQ4_NL", "Q4_K_M", "MXFP4"])
def test_every_stage_of_a_stored_file_agrees_with_llama_cpp_running_it(folder: Path, name: str, numerics: Numerics):
    rows = judged(folder, name, numerics)
    assert [row for row in rows if row.verdict == FAIL] == []
    assert {"00", "01", "01b", "02", "03", "04", "05", "06", "07", "08", "09", "10", "11", "12", "13"} == {
        row.checkpoint for row in rows
    }
    (selected,) = (row for row in rows if row.checkpoint == "09")
    within = selected.error <= selected.tolerance and selected.worst <= selected.tolerance_worst
    assert (selected.verdict == PASS) == within  # what passes needs no excuse
    products = [row for row in rows if row.stage in ("q_proj", "ffn_out", "logits") and row.mode == "isolated"]
    assert max(row.error for row in products) ** 2 <= 1e-12


@pytest.mark.live
def test_packed_matrices_are_judged_alike(folder: Path):
    assert not [row for row in judged(folder, "Q4_K_M", residency="packed") if row.verdict == FAIL]


@contextmanager
def replaced(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(matrix, name, wrong)
        yield


WRONG: dict[str, Callable] = {
    "inputs are not rounded": lambda x, kind: x,
    "rounded to the wrong type": lambda x, kind: round_activations(x, "Q8_0" if kind == "Q8_K" else "F16"),
    "another variant of rounding": lambda x, kind: np.trunc(x * 64) / 64,
}


@pytest.mark.live
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_rounding_goes_red_at_the_first_product(folder: Path, monkeypatch: pytest.MonkeyPatch, wrong: str):
    with replaced(monkeypatch, "round_activations", WRONG[wrong]):
        failing = [row for row in judged(folder, "Q4_K_M") if row.verdict == FAIL]
    assert {row.stage for row in failing if row.mode == "isolated"} >= {"q_proj", "attn_out", "ffn_out", "logits"}
    assert max(row.error / row.tolerance for row in failing if row.tolerance) > 100


@pytest.mark.live
def test_the_judged_tokens_end_in_the_continuation_but_for_its_last_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("llama_cpp")
    seen: list[Mapping] = []

    def judge(name: str, weights: Weights, *what: Mapping) -> None:
        seen.extend(what)
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "QuantisedVerifier", judge)
    with pytest.raises(KeyboardInterrupt):
        list(verify_as_stored(model(folder, "F16"), IDS))
    cases, evidence = seen
    greedy = evidence["llamacpp"].greedy
    assert len(greedy) > 1
    assert cases["near"].ids == (*IDS, *greedy[:-1].tolist())


@pytest.mark.live
def test_matrices_of_several_tiles_are_decoded_as_ggml_does_and_counted_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("llama_cpp")
    monkeypatch.setattr("llorch.files.packed.TILE", 5 * 256)
    weights = model(folder, "Q8_0").weights
    assert {row.verdict for row in verify.decode_rows("m", weights)} == {PASS}
    monkeypatch.setattr(verify, "in_child", lambda *what: in_child(*what) + np.float32(1))
    (row,) = verify.decode_rows("m", weights)
    assert (row.stage, row.verdict, row.error) == ("decode.Q8_0", FAIL, 1.0)


@pytest.mark.live
def test_llama_cpp_rounds_for_a_file_only(tmp_path: Path):
    pytest.importorskip("llama_cpp")
    place = write_folder(tmp_path, random_tensors("llama"))
    with pytest.raises(ValueError, match="ggml numerics need a GGUF file; make one with llorch convert"):
        open_producer("llamacpp", place, numerics=GGML)


@pytest.mark.live
def test_flips_are_counted_and_what_they_would_do_is_said(folder: Path):
    rows = judged(folder, "BF16")
    (near,) = (row for row in rows if (row.stage, row.mode, row.case) == ("logits", "free", "near"))
    flips = sum(row.flips for row in rows if (row.mode, row.case) == ("chained", "near"))
    assert f"{flips} values flip; as it runs, with nothing replaced: error" in near.note
    assert flips > 0


def verifier(folder: Path, change: Callable[[np.ndarray], np.ndarray] = lambda logits: logits) -> QuantisedVerifier:
    """One whose golden is our own pass, but for its logits; the last four tokens are its continuation."""
    weights = model(folder, "Q8_0").weights
    trace = run(weights, Pass(tuple(IDS)))
    trace["logits"] = change(trace["logits"].copy())
    greedy = trace["logits"][-4:].argmax(axis=-1)
    evidence = Evidence({"near": trace}, selected_logits=trace["logits"][-1], probabilities={}, greedy=greedy)
    return QuantisedVerifier("m", weights, {"near": Pass(tuple(IDS))}, {"llamacpp": evidence})


@pytest.mark.parametrize(
    ("ours", "selected", "ties"), [(1, 1, True), (1.01, 1, False), (1, 1.001, True), (1, 2, False)]
)
def test_only_flips_between_two_runs_of_llama_cpp_excuse_a_failure(folder: Path, ours, selected, ties):
    made = verifier(folder, lambda logits: logits / np.float32(ours))
    shown = replace(made.evidence["llamacpp"], selected_logits=made._last_row() * np.float32(selected))
    made._golden = shown
    tolerances = {
        "near": {"chained": {"selected_logits": limit(shown.traces["near"]["logits"][-1:], np.full(1, 1e-12))}}
    }
    for checkpoint in ("09", "10"):
        row = made._against_one_pass(exact_row("m", checkpoint, "argmax", "llamacpp", 1.0, "said before"), tolerances)
        assert row.verdict == (TIE if ties else FAIL)
        assert row.note.startswith("said before")
        assert ("computes all rows at once" in row.note) == ties


def text(made: QuantisedVerifier, tokens: list[int], margin: float) -> Row:
    """The row of our text against another; the golden finds its tokens better than ours by `margin`."""
    ours = made._generated(IDS[: len(IDS) + 1 - len(tokens)], len(tokens))
    trace = dict(made._golden.traces["near"])
    trace["logits"] = trace["logits"].copy()
    for at, (got, want) in enumerate(zip(ours, tokens, strict=True), start=len(IDS) - len(tokens)):
        trace["logits"][at, want] = trace["logits"][at, got] + np.float32(margin)
    made._golden = replace(made._golden, traces={"near": trace}, greedy=np.asarray(tokens))
    return made._generation_row()


def test_our_text_runs_free_and_another_token_must_be_explained_by_flips(folder: Path):
    made = verifier(folder)
    right = made._generated(IDS[:-1], 2).tolist()
    assert text(made, right, 0.0).verdict == PASS
    allowed = made._gap(len(IDS) - 1, 0, 1)[1]
    other = [right[0], (right[1] + 1) % 96]
    assert (tie := text(made, other, 0.001 * allowed)).verdict == TIE
    assert "token 1: got" in tie.note
    assert text(made, other, 10.0).verdict == FAIL


def test_limits_are_made_of_the_golden_and_not_of_what_ours_computes(folder: Path, monkeypatch: pytest.MonkeyPatch):
    wanted = verifier(folder).tolerances()
    golden = verifier(folder)
    monkeypatch.setattr("llorch.verify.quantised.forward", None)
    assert golden.tolerances() == wanted


@pytest.mark.parametrize("name", ["embed", "l0.k_cache", "l1.v_cache", "l0.attn_residual", "l1.block_out"])
def test_copies_and_sums_of_two_are_exact_on_the_same_input(folder: Path, name: str):
    assert verifier(folder).tolerances()["near"]["isolated"][name] == EXACT


def test_an_error_goes_through_a_product_as_it_was_derived(folder: Path):
    """Noise of the derived size on what enters a stage gives noise of the derived size behind it."""
    made = verifier(folder)
    (evidence,) = made.evidence.values()
    golden, rng = evidence.traces["near"], np.random.default_rng(0)
    spread = {name: array[1] for name, array in variances(made.weights, made.cases["near"], golden)}
    weights = made.weights.layer(0)

    def moved(name: str) -> np.ndarray:
        return golden[name] + rng.standard_normal(golden[name].shape) * np.sqrt(spread[name]) * 1e3

    gate, up = moved("l0.ffn_gate"), moved("l0.ffn_up")
    act = gate / (1 + np.exp(-gate)) * up - golden["l0.ffn_act"]
    assert np.linalg.norm(act) / np.sqrt(spread["l0.ffn_act"].sum()) == pytest.approx(1e3, rel=0.1)
    x = moved("l0.attn_residual")
    norm = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + made.weights.config.rms_norm_eps) * weights["ffn_norm"]
    size = np.linalg.norm(norm - golden["l0.ffn_norm"]) / np.sqrt(spread["l0.ffn_norm"].sum())
    assert size == pytest.approx(1e3, rel=0.1)


def test_the_truth_is_float64_also_through_matrices(folder: Path):
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
    mixed, n_flips, n_refused = adopt_edges(ours, golden, kind, np.abs(golden) * 2e-6)
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
    mixed, n_flips, n_refused = adopt_edges(ours, golden, kind, np.abs(golden) * 1e-5)
    assert n_flips == 0 < n_refused
    np.testing.assert_array_equal(mixed, ours)


def test_equal_values_have_no_flips_and_nothing_is_replaced():
    x = np.random.default_rng(1).normal(0, 1, (3, 512)).astype(np.float32)
    same, *counts = adopt_edges(x, x.copy(), "Q8_K", np.zeros_like(x))
    assert counts == [0, 0]
    assert same is x


def test_which_stages_are_rounded_follows_from_types_and_cache(folder: Path):
    stages = rounded_stages(model(folder, "Q4_K_M").weights)
    assert stages["l0.attn_norm"] == stages["final_norm"] == {"Q8_K"}
    assert "l0.q_rope" not in stages
    half = rounded_stages(model(folder, "Q4_K_M", F16_CACHE).weights)
    rounded_by_the_cache = {
        f"l{layer}.{name}" for layer in (0, 1) for name in ("q_rope", "k_rope", "v_proj", "attn_probs")
    }
    assert half.keys() - stages.keys() == rounded_by_the_cache
    assert all(half[name] == {"F16"} for name in rounded_by_the_cache)
    assert rounded_stages(llorch.load("story", numerics=GGML).weights) == {}


def test_the_rounding_is_named(folder: Path):
    assert emulated(model(folder, "Q4_K_M").weights) == "Q4_K, Q6_K: inputs rounded to Q8_K"
    assert emulated(model(folder, "Q8_0", F16_CACHE).weights) == (
        "Q8_0: inputs rounded to Q8_0; cache F16: queries and probabilities rounded to F16"
    )
    assert emulated(open_weights(builtin_path("story"))) == ""
