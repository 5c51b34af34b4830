"""Verification under ggml numerics; the live part runs llama.cpp on files of all three families."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_models import random_tensors, write_folder

import llorch
from llorch import verify
from llorch.builtin import builtin_path
from llorch.compare import Tolerance
from llorch.evidence import Evidence
from llorch.model import Model
from llorch.numerics import GGML, Numerics
from llorch.ops.rounding import BLOCK_SIZE, round_activations
from llorch.producers import open_producer
from llorch.quantised import EDGE, QuantisedVerifier, adopt_edges, emulated, rounded_stages
from llorch.quantised_models import write_model
from llorch.replay import Pass
from llorch.sums import product_limit
from llorch.verifier import FAIL, PASS, TIE, Row, exact_row, run
from llorch.verify import verify_as_stored
from llorch.weights import Weights, matrix, open_weights

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
    assert max(row.error / row.tolerance for row in failing) > 100


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
    from llorch.producers import ggml_tensor

    monkeypatch.setattr("llorch.weights.packed.TILE", 5 * 256)
    weights = model(folder, "Q8_0").weights
    assert {row.verdict for row in verify.decode_rows("m", weights)} == {PASS}
    right = ggml_tensor.decode
    monkeypatch.setattr(ggml_tensor, "decode", lambda *what: right(*what) + np.float32(1))
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
    (near,) = (row for row in rows if (row.stage, row.mode, row.case) == ("logits", "chained", "near"))
    flips = sum(row.flips for row in rows if (row.mode, row.case) == ("chained", "near"))
    assert f"{flips} values flip; as it runs, with nothing replaced: error" in near.note
    assert flips > 0


def verifier(folder: Path, change: Callable[[np.ndarray], np.ndarray]) -> QuantisedVerifier:
    """One whose golden is our own pass, but for its logits."""
    weights = model(folder, "Q8_0").weights
    trace = run(weights, Pass(tuple(IDS)))
    trace["logits"] = change(trace["logits"].copy())
    greedy = trace["logits"][-4:].argmax(axis=-1)
    evidence = Evidence({"near": trace}, selected_logits=trace["logits"][-1], probabilities={}, greedy=greedy)
    return QuantisedVerifier("m", weights, {"near": Pass(tuple(IDS))}, {"llamacpp": evidence})


def first_up(place: int) -> Callable[[np.ndarray], np.ndarray]:
    """Make the first token the best one of a row."""

    def change(logits: np.ndarray) -> np.ndarray:
        logits[place, 0] = logits.max() + 1
        return logits

    return change


@pytest.mark.parametrize(
    ("change", "ties"),
    [
        (lambda logits: logits, {"09", "10", "12"}),
        (lambda logits: logits * np.float32(1.01), {"10", "12"}),
        (lambda logits: -logits, set()),
        (first_up(-4), {"09", "10"}),
        (first_up(-5), {"09", "10", "12"}),
    ],
    ids=["the same", "other numbers", "other tokens", "an earlier token", "a token before the continuation"],
)
def test_only_what_llama_cpp_gives_in_one_pass_excuses_a_failure(folder: Path, change: Callable, ties: set[str]):
    made = verifier(folder, change)
    tolerances = {"near": {"chained": {"logits": Tolerance(1e-6, 1e-6)}}}
    for checkpoint in ("09", "10", "12"):
        row = exact_row("m", checkpoint, "argmax", "llamacpp", 1.0, "said before")
        judged_row = made._against_one_pass(row, tolerances)
        assert judged_row.verdict == (TIE if checkpoint in ties else FAIL)
        assert judged_row.note.startswith("said before")
        assert ("computes all rows at once" in judged_row.note) == (checkpoint in ties)


def test_the_last_row_and_the_continuation_are_those_of_the_end_of_the_pass(folder: Path):
    made = verifier(folder, lambda logits: logits)
    want = run(made.weights, Pass(tuple(IDS)))["logits"]
    ids, rows = made._greedy(4)
    np.testing.assert_array_equal(made._last_row(), want[-1])
    np.testing.assert_array_equal(rows, want[-4:])
    np.testing.assert_array_equal(ids, want[-4:].argmax(axis=-1))


def test_the_limit_of_a_stage_is_the_largest_of_its_layers(folder: Path):
    made = verifier(folder, lambda logits: logits)
    (evidence,) = made.evidence.values()
    trace = {**evidence.traces["near"]}
    trace["l0.ffn_out"] = trace["l0.ffn_out"] / np.float32(100)  # as if the sums of the first layer cancelled
    made.evidence = {"llamacpp": replace(evidence, traces={"near": trace})}
    first, last = (
        product_limit(trace[f"l{i}.ffn_act"], made.weights[f"layers.{i}.down_proj"], trace[f"l{i}.ffn_out"])
        for i in (0, 1)
    )
    assert made._product_limits["near", "ffn_out"] == first > 2 * last


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
    mixed, n_flips = adopt_edges(ours, golden, kind)
    assert n_flips > 0
    apart = np.abs(round_activations(mixed, kind) - round_activations(golden, kind))
    assert apart.max() <= EDGE * np.abs(golden).max()
    assert np.abs(round_activations(ours, kind) - round_activations(golden, kind)).max() > 1e-4
    blocks = [array.reshape(-1, BLOCK_SIZE.get(kind, 1)) for array in (mixed, ours, golden)]
    kept, taken = ((blocks[0] == other).all(axis=-1) for other in blocks[1:])
    assert (kept | taken).all()
    assert 0 < (~kept).sum() <= n_flips  # only blocks with a flip are replaced


def test_equal_values_have_no_flips_and_nothing_is_replaced():
    x = np.random.default_rng(1).normal(0, 1, (3, 512)).astype(np.float32)
    same, n_flips = adopt_edges(x, x.copy(), "Q8_K")
    assert n_flips == 0
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
