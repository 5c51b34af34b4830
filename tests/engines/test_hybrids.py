"""Hybrids in both engines: every stage there is, whole and layer by layer, from folders and from llama.cpp's files."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from builders.families import HYBRIDS, random_folder, twin

from llorch.engines import EngineName, open_in_process
from llorch.engines.interface import Trace, unsupported_reason
from llorch.files import open_weights
from llorch.judging.runners.numpy import run
from llorch.model.blocks.delta_net import heads
from llorch.stages.stage_ref import Pass
from llorch.stages.table import BY_NAME

pytestmark = pytest.mark.live
IDS = tuple(np.random.default_rng(0).integers(3, 104, 70).tolist())  # more than a chunk of 64


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def write_pair(family: str) -> tuple[Path, Path]:
        root = tmp_path_factory.mktemp(family)
        folder = random_folder(family, root / "folder", seed=5)
        return folder, twin(folder, root / "model.gguf")

    return write_pair


def largest_error(actual: Trace, expected: Trace) -> float:
    assert actual.keys() == expected.keys()
    distances = [0.0]
    for name in actual:
        finite = np.isfinite(expected[name])
        assert (np.isfinite(actual[name]) == finite).all(), name
        if BY_NAME[name.rpartition(".")[2]].name == "topk_ids":
            assert (np.sort(actual[name]) == np.sort(expected[name])).all(), name
            continue
        a, b = actual[name][finite].astype(np.float64), expected[name][finite].astype(np.float64)
        distances.append(float(np.linalg.norm(a - b) / np.linalg.norm(b)))
    return max(distances)


@pytest.mark.nightly_cases(but=["qwen3_5_moe-300"])
@pytest.mark.parametrize("first_position", [0, 300])
@pytest.mark.parametrize("family", HYBRIDS)
def test_engine_traces_match_float64(models, family: str, first_position: int):
    folder, file = models(family)
    with open_in_process("transformers", file, n_threads=1, dtype="float64") as engine:
        assert engine.load_path.read == "llorch"
        reference = engine.trace(IDS, first_position=first_position)
    assert largest_error(run(open_weights(file).astype(np.float64), Pass(IDS, first_position)), reference) < 1e-13
    engines: list[tuple[EngineName, Path]] = [("llamacpp", file), ("transformers", file), ("transformers", folder)]
    for name, path in engines:
        with open_in_process(name, path, n_threads=1) as engine:
            assert largest_error(engine.trace(IDS, first_position=first_position), reference) < 2e-5


@pytest.mark.parametrize("family", HYBRIDS)
def test_layerwise_trace_equals_the_full_model(models, family: str):
    for path in models(family):
        shown = []
        for streamed in (False, True):
            with open_in_process("transformers", path, n_threads=1, dtype="float64", streamed=streamed) as engine:
                shown.append(engine.call_batch([("trace", (IDS,), {}), ("greedy", (IDS, 4), {})]))
        assert largest_error(shown[0][0], shown[1][0]) == 0
        assert shown[0][1] == shown[1][1]


@pytest.mark.parametrize("streamed", [False, True])
def test_text_part_of_a_multimodal_model_runs_alone(tmp_path: Path, streamed: bool):
    folder = random_folder("qwen3_5", tmp_path, seed=6, nested=True)
    with open_in_process("transformers", folder, n_threads=1, dtype="float64", streamed=streamed) as engine:
        reference = engine.trace(IDS)
    assert largest_error(run(open_weights(folder).astype(np.float64), Pass(IDS, 0)), reference) < 1e-13


MADE_OF = {  # stage to those that are made of it
    "l0.qkv_in": {"conv_out", "conv_state"},
    "l0.conv_out": {"q_l2", "k_l2", "delta_out", "delta_state"},
    "l0.k_l2": {"delta_out", "delta_state"},
    "l0.q_l2": {"delta_out"},
    "l0.b_in": {"beta"},
    "l0.log_decay": {"delta_out", "delta_state"},
    "l0.z_in": {"gated_norm"},
    "l3.attn_context": {"attention", "attn_gated"},
    "l3.attn_gate": {"attn_gated"},
}


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_changed_isolated_stage_changes_its_dependents(models, family: str):
    folder, _ = models(family)
    with open_in_process("transformers", folder, n_threads=1, dtype="float64") as engine:
        golden = engine.trace(IDS)
        for changed, moved in MADE_OF.items():
            found = engine.isolated(IDS, golden | {changed: 1.25 * golden[changed]})  # pyright: ignore
            wanted = {changed, *(f"{changed.partition('.')[0]}.{name}" for name in moved)}
            assert {name for name, far in found.items() if far.error > 1e-9} == wanted


def test_llamacpp_uses_rms_norm_eps_for_l2_norms(tmp_path: Path):
    """Where the engines differ (llama.cpp#28068): transformers has 1e-6, whatever rms_norm_eps is."""
    folder = random_folder("qwen3_5", tmp_path / "folder", seed=7, rms_norm_eps=1e-3)
    file = twin(folder, tmp_path / "model.gguf")
    weights = open_weights(file)
    assert "rms_norm_eps" in unsupported_reason("llamacpp", weights.config, len(IDS))
    assert unsupported_reason("transformers", weights.config, len(IDS)) == ""
    for name, path, eps in (("llamacpp", file, 1e-3), ("transformers", folder, 1e-6)):
        with open_in_process(name, path, n_threads=1) as engine:  # pyright: ignore[reportArgumentType]
            trace = engine.trace(IDS)
        q, _, _ = heads(trace["l0.conv_out"].astype(np.float64), weights.config)
        wanted = q / np.sqrt((q * q).sum(-1, keepdims=True) + eps)
        np.testing.assert_allclose(trace["l0.q_l2"], wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
        assert np.abs(wanted - q / np.sqrt((q * q).sum(-1, keepdims=True) + 1.001e-3 - eps)).max() > 1e-3


def test_unequal_key_and_value_widths_use_transformers_alone(tmp_path: Path):
    folder = random_folder("qwen3_next", tmp_path, seed=8, linear_key_head_dim=10, linear_value_head_dim=14)
    weights = open_weights(folder)
    assert "linear_value_head_dim 14" in unsupported_reason("llamacpp", weights.config, len(IDS))
    with open_in_process("transformers", folder, n_threads=1, dtype="float64") as engine:
        reference = engine.trace(IDS)
    assert reference["l0.delta_state"].shape == (6, 10, 14)
    assert largest_error(run(weights.astype(np.float64), Pass(IDS, 0)), reference) < 1e-13
