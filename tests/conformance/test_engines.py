"""Random models of every family, judged by every engine that can; and a family is a row of the tests."""

from pathlib import Path

import numpy as np
import pytest
from builders.families import BOTH, labelled, random_folder, twin
from helpers.command_line import invoke
from helpers.refusals import assert_tells
from safetensors.numpy import load_file, save_file

from llorch.engines import EngineName, open_engine
from llorch.files import open_weights
from llorch.judging.runners.numpy import run
from llorch.judging.verify import plan_live, unable_engines, verify_ggml, verify_live
from llorch.model.model import load
from llorch.ops.numerics import GGML
from llorch.stages.comparison import FAIL, PASS, TIE
from llorch.stages.stage_ref import Pass

pytestmark = pytest.mark.live
IDS = [int(token) for token in np.random.default_rng(0).integers(3, 100, 30)]
CASES = labelled("engine_cases")
GATE_IDS = [5, 71, 12, 99, 34, 8, 60, 47, 23]
REASON = ("l1.shared_gate", "(near)", "NaN", "sigmoid(x)", "silu(x) / x")


def failures(path: Path, engines: tuple[EngineName, ...]) -> list[str]:
    comparisons = list(verify_live(plan_live(open_weights(path), IDS, engines)))
    assert {c.engine for c in comparisons if c.mode == "chained"} >= {*engines, "transformers-float64"}
    return [f"{c.engine} {c.stage_ref.name} {c.mode} {c.note}" for c in comparisons if c.verdict in (FAIL, TIE)]


@pytest.mark.nightly_cases(but=["mistral"])
@pytest.mark.parametrize("name", CASES)
def test_random_folder_agrees_with_every_supported_engine(tmp_path: Path, name: str):
    family, (overrides, engines) = CASES[name]
    folder = random_folder(family, tmp_path / name, 0, **overrides)
    assert failures(folder, engines) == []


@pytest.mark.nightly_cases(but=["ministral3"])
@pytest.mark.parametrize("name", [name for name, (_, (_, engines)) in CASES.items() if engines == BOTH])
def test_gguf_copy_agrees_with_both_engines(tmp_path: Path, name: str):
    family, (overrides, _) = CASES[name]
    path = twin(random_folder(family, tmp_path / name, 1, **overrides), tmp_path / f"{name}.gguf")
    assert failures(path, BOTH) == []


def test_llama_cpp_has_no_eps_in_qwen2vl(tmp_path: Path):
    folder = random_folder("qwen2_5_vl", tmp_path / "vl", 0)
    with open_engine("llamacpp", folder) as engine:
        trace = engine.trace(IDS)
    weights = open_weights(folder)
    x, gain, eps = trace["embed"].astype(np.float64), weights["layers.0.attn_norm"], weights.config.rms_norm_eps
    mean_square = np.square(x).mean(axis=-1, keepdims=True)
    without, right = (x / np.sqrt(mean_square + added) * gain for added in (0.0, eps))
    far = [np.abs(trace["l0.attn_norm"] - expected).max() / np.abs(expected).max() for expected in (without, right)]
    assert far[0] < 1e-6 < 1e-5 < far[1]
    assert "layer_norm_rms_epsilon" in unable_engines(BOTH, weights.config, IDS, 8)["llamacpp"]


def test_llama_cpp_does_not_rotate_some_pairs_of_interleaved_sections(tmp_path: Path):
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}  # as 24, 20, 20 of the 8B model
    path = twin(random_folder("qwen3_vl", tmp_path / "vl", 0, rope_parameters=rope), tmp_path / "vl.gguf")
    traces = []
    for name in BOTH:
        with open_engine(name, path) as engine:
            traces.append(engine.trace(IDS))
    far = np.abs(traces[0]["l0.k_rope"] - traces[1]["l0.k_rope"]).max(axis=(0, 1))
    assert {*np.flatnonzero(far > 1e-3)} == {7, 15}
    assert "pairs 7 of" in unable_engines(BOTH, open_weights(path).config, IDS, 8)["llamacpp"]
    assert failures(path, ("transformers",)) == []


def test_multimodal_file_text_matches_transformers(tmp_path: Path):
    path = twin(random_folder("qwen2_5_vl", tmp_path / "vl", 1), tmp_path / "vl.gguf")
    assert failures(path, ("transformers",)) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The gate of the shared expert of its second layer is zero, of which llama.cpp makes NaN."""
    folder = random_folder("qwen2_moe", tmp_path_factory.mktemp("gates") / "folder", 5, num_hidden_layers=2)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.shared_expert_gate.weight"][:] = 0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    return twin(folder, folder.with_name("model.gguf"))


def test_gate_is_half_open_in_llorch_and_transformers_and_nan_in_llamacpp(file: Path):
    ours = run(open_weights(file), Pass(tuple(GATE_IDS)))
    with open_engine("transformers", file) as engine:
        right = engine.trace(GATE_IDS)
    with open_engine("llamacpp", file) as engine:
        wrong = engine.trace(GATE_IDS)
    assert (ours["l1.shared_gate"] == 0.5).all()
    assert (right["l1.shared_gate"] == 0.5).all()
    lost = {name for name, array in wrong.items() if np.isnan(array).any()}
    assert lost == {"l1.shared_gate", "l1.moe_out", "l1.block_out", "final_norm", "logits"}
    assert all(np.isnan(wrong[name]).all() for name in lost)


def test_file_with_llamacpp_nan_passes_by_reference_and_transformers(file: Path):
    failed: dict[str, str] = {}
    comparisons = list(
        verify_live(plan_live(open_weights(file), GATE_IDS, ["llamacpp", "transformers"]), failed=failed)
    )
    assert {c.verdict for c in comparisons} == {PASS}
    assert {c.engine for c in comparisons} == {"reader", "transformers", "transformers-float64"}
    assert failed.keys() == {"llamacpp"}
    assert_tells(failed["llamacpp"], "9 NaN of 9", *REASON, where="llamacpp")


def test_file_with_llamacpp_nan_and_no_other_engine_is_not_compared(folder: Path, tmp_path: Path):
    half = twin(folder, tmp_path / "half.gguf", kind="MOSTLY_F16")
    failed: dict[str, str] = {}
    assert list(verify_ggml(load(half, numerics=GGML), GATE_IDS, failed=failed)) == []
    assert_tells(failed["llamacpp"], *REASON)


def test_command_names_only_the_faulty_engine(file: Path):
    result = invoke("verify", str(file), "--tokens", ",".join(map(str, GATE_IDS)))
    assert result.exit_code == 3  # as where an engine is missing: half of what was asked for is not known
    assert_tells(" ".join(result.stdout.split()), "NOT RUN: llamacpp", "9 NaN of 9", *REASON)
    assert " 0 failed" in result.stdout
    assert "FAIL" not in result.stdout
