"""Random models of every family, with windows, without RoPE, with temperature, judged by every engine that can."""

from pathlib import Path

import numpy as np
import pytest
from builders.families import BOTH, labelled, random_folder, twin

from llorch.engines import EngineName, open_engine
from llorch.files import open_weights
from llorch.judging.verify import plan_live, unable_for, verify_live
from llorch.stages.comparison import FAIL, TIE

pytestmark = pytest.mark.live
IDS = [int(token) for token in np.random.default_rng(0).integers(3, 100, 30)]
CASES = labelled("engine_cases")


def failures(path: Path, engines: tuple[EngineName, ...]) -> list[str]:
    comparisons = list(verify_live(plan_live(open_weights(path), IDS, engines)))
    assert {c.engine for c in comparisons if c.mode == "chained"} >= {*engines, "transformers-float64"}
    return [f"{c.engine} {c.stage_ref.name} {c.mode} {c.note}" for c in comparisons if c.verdict in (FAIL, TIE)]


@pytest.mark.nightly_cases(but=["mistral"])
@pytest.mark.parametrize("name", CASES)
def test_a_random_folder_agrees_with_every_engine_that_can_judge_it(tmp_path: Path, name: str):
    family, (overrides, engines) = CASES[name]
    folder = random_folder(family, tmp_path / name, 0, **overrides)
    assert failures(folder, engines) == []


@pytest.mark.nightly_cases(but=["ministral3"])
@pytest.mark.parametrize("name", [name for name, (_, (_, engines)) in CASES.items() if engines == BOTH])
def test_its_twin_agrees_with_both_engines(tmp_path: Path, name: str):
    family, (overrides, _) = CASES[name]
    path = twin(random_folder(family, tmp_path / name, 1, **overrides), tmp_path / f"{name}.gguf")
    assert failures(path, BOTH) == []


def test_where_the_engines_differ_llama_cpp_has_no_eps_in_qwen2vl(tmp_path: Path):
    folder = random_folder("qwen2_5_vl", tmp_path / "vl", 0)
    with open_engine("llamacpp", folder) as engine:
        trace = engine.trace(IDS)
    weights = open_weights(folder)
    x, gain, eps = trace["embed"].astype(np.float64), weights["layers.0.attn_norm"], weights.config.rms_norm_eps
    mean_square = np.square(x).mean(axis=-1, keepdims=True)
    without, right = (x / np.sqrt(mean_square + added) * gain for added in (0.0, eps))
    far = [np.abs(trace["l0.attn_norm"] - expected).max() / np.abs(expected).max() for expected in (without, right)]
    assert far[0] < 1e-6 < 1e-5 < far[1]
    assert "layer_norm_rms_epsilon" in unable_for(BOTH, weights.config, IDS, 8)["llamacpp"]


def test_llama_cpp_does_not_rotate_some_pairs_of_interleaved_sections(tmp_path: Path):
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}  # as 24, 20, 20 of the 8B model
    path = twin(random_folder("qwen3_vl", tmp_path / "vl", 0, rope_parameters=rope), tmp_path / "vl.gguf")
    traces = []
    for name in BOTH:
        with open_engine(name, path) as engine:
            traces.append(engine.trace(IDS))
    far = np.abs(traces[0]["l0.k_rope"] - traces[1]["l0.k_rope"]).max(axis=(0, 1))
    assert {*np.flatnonzero(far > 1e-3)} == {7, 15}
    assert "pairs 7 of" in unable_for(BOTH, open_weights(path).config, IDS, 8)["llamacpp"]
    assert failures(path, ("transformers",)) == []


def test_multimodal_file_text_matches_transformers(tmp_path: Path):
    path = twin(random_folder("qwen2_5_vl", tmp_path / "vl", 1), tmp_path / "vl.gguf")
    assert failures(path, ("transformers",)) == []
