"""Where the engines differ: the gate of a shared expert whose logit is 0, one half, is NaN in llama.cpp."""

from pathlib import Path

import numpy as np
import pytest
from builders.families import random_folder, twin
from helpers.command_line import invoke
from helpers.refusals import assert_tells
from safetensors.numpy import load_file, save_file

from llorch.engines import open_engine
from llorch.files import open_weights
from llorch.judging.runners.numpy import run
from llorch.judging.verify import plan_live, verify_ggml, verify_live
from llorch.model.model import load
from llorch.ops.numerics import GGML
from llorch.stages.comparison import PASS
from llorch.stages.stage_ref import Pass

pytestmark = pytest.mark.live
IDS = [5, 71, 12, 99, 34, 8, 60, 47, 23]
REASON = ("l1.shared_gate", "(near)", "NaN", "sigmoid(x)", "silu(x) / x")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its second of two layers has a gate of zeros."""
    folder = random_folder("qwen2_moe", tmp_path_factory.mktemp("gates") / "folder", 5, num_hidden_layers=2)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.shared_expert_gate.weight"][:] = 0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    return twin(folder, folder.with_name("model.gguf"))


def test_transformers_and_we_open_it_by_half_and_llamacpp_loses_all_that_follows(file: Path):
    ours = run(open_weights(file), Pass(tuple(IDS)))
    with open_engine("transformers", file) as engine:
        right = engine.trace(IDS)
    with open_engine("llamacpp", file) as engine:
        wrong = engine.trace(IDS)
    assert (ours["l1.shared_gate"] == 0.5).all()
    assert (right["l1.shared_gate"] == 0.5).all()
    lost = {name for name, array in wrong.items() if np.isnan(array).any()}
    assert lost == {"l1.shared_gate", "l1.moe_out", "l1.block_out", "final_norm", "logits"}
    assert all(np.isnan(wrong[name]).all() for name in lost)


def test_file_with_llamacpp_nan_passes_by_reference_and_transformers(file: Path):
    failed: dict[str, str] = {}
    comparisons = list(verify_live(plan_live(open_weights(file), IDS, ["llamacpp", "transformers"]), failed=failed))
    assert {c.verdict for c in comparisons} == {PASS}
    assert {c.engine for c in comparisons} == {"reader", "transformers", "transformers-float64"}
    assert failed.keys() == {"llamacpp"}
    assert_tells(failed["llamacpp"], "9 NaN of 9", *REASON, where="llamacpp")


def test_file_with_llamacpp_nan_and_no_other_engine_is_not_compared(folder: Path, tmp_path: Path):
    half = twin(folder, tmp_path / "half.gguf", kind="MOSTLY_F16")
    failed: dict[str, str] = {}
    assert list(verify_ggml(load(half, numerics=GGML), IDS, failed=failed)) == []
    assert_tells(failed["llamacpp"], *REASON)


def test_the_command_names_the_fault_and_blames_nobody_else(file: Path):
    result = invoke("verify", str(file), "--tokens", ",".join(map(str, IDS)))
    assert result.exit_code == 3  # as where an engine is missing: half of what was asked for is not known
    assert_tells(" ".join(result.stdout.split()), "NOT RUN: llamacpp", "9 NaN of 9", *REASON)
    assert " 0 failed" in result.stdout
    assert "FAIL" not in result.stdout
