"""Verification under ggml numerics; the live part runs llama.cpp on files of all three families."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import llorch
from llorch.builtin import builtin_path
from llorch.model import Model
from llorch.numerics import GGML, Numerics
from llorch.ops.rounding import round_activations
from llorch.quantised import EDGE, adopt_edges, emulated, rounded_stages, rounding_bound
from llorch.quantised_models import write_model
from llorch.verifier import FAIL, Row
from llorch.verify import verify_as_stored
from llorch.weights import matrix, open_weights

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
def test_flips_are_counted_and_what_they_would_do_is_said(folder: Path):
    rows = judged(folder, "BF16")
    (near,) = (row for row in rows if (row.stage, row.mode, row.case) == ("logits", "chained", "near"))
    flips = sum(row.flips for row in rows if (row.mode, row.case) == ("chained", "near"))
    assert f"{flips} values flip; as it runs, with nothing replaced: error" in near.note
    assert flips > 0


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
    assert np.isin(mixed, np.concatenate([ours, golden])).all()


def test_equal_values_have_no_flips_and_nothing_is_replaced():
    x = np.random.default_rng(1).normal(0, 1, (3, 512)).astype(np.float32)
    same, n_flips = adopt_edges(x, x.copy(), "Q8_K")
    assert n_flips == 0
    assert same is x


def test_which_stages_are_rounded_follows_from_types_and_cache(folder: Path):
    stages = rounded_stages(model(folder, "Q4_K_M").weights)
    assert stages["l0.attn_norm"] == stages["final_norm"] == {"Q8_K"}
    assert "l0.q_rope" not in stages
    assert rounded_stages(model(folder, "Q4_K_M", F16_CACHE).weights)["l1.attn_probs"] == {"F16"}
    assert rounded_stages(llorch.load("story", numerics=GGML).weights) == {}


def test_the_rounding_is_named(folder: Path):
    assert emulated(model(folder, "Q4_K_M").weights) == "Q4_K, Q6_K: inputs rounded to Q8_K"
    assert emulated(model(folder, "Q8_0", F16_CACHE).weights) == (
        "Q8_0: inputs rounded to Q8_0; cache F16: queries and probabilities rounded to F16"
    )
    assert emulated(open_weights(builtin_path("story"))) == ""


def test_the_bound_of_a_product_grows_with_its_width_and_with_cancellation():
    rng = np.random.default_rng(0)
    bounds = []
    for width in (256, 4096):
        x, w = rng.normal(0, 1, (4, width)).astype(np.float32), rng.normal(0, 1, (64, width)).astype(np.float32)
        bounds.append(rounding_bound(x, w, x @ w.T))
    assert bounds[1] == pytest.approx(4 * bounds[0], rel=0.15)
    assert bounds[0] == pytest.approx(4 * 2**0.5 * 2**-24 * (256 / 48) ** 0.5, rel=0.15)
    cancelling = np.concatenate([x, -x], axis=1)
    matrix_twice = np.concatenate([w, w * np.float32(1.001)], axis=1)
    assert rounding_bound(cancelling, matrix_twice, cancelling @ matrix_twice.T) > 100 * bounds[1]
