"""Models of every family on a CUDA device: logits, and answers through recorded steps, beside float64 on the CPU."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.families import FAMILIES, random_folder
from builders.quantised_folders import FOLDERS

from llorch.files.convert import convert
from llorch.files.quant import GGMLType
from llorch.model.generate import IdsOnly
from llorch.pytorch.kernels.triton.graph import GraphedSteps
from llorch.pytorch.model import TorchModel, load_torch

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="NOT RUN: transformers is not installed")
IDS = np.arange(70) * 7 % 104
EVEN: dict[str, Any] = {
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "head_dim": 64,
}
WAYS: dict[str, dict[str, Any]] = {
    "auto": {}, "own": {"kernels": "own"}, "torch": {"kernels": "torch"}, "eager": {"attention": "eager"},
    "reproducible": {"mode": "reproducible"}, "float64": {"dtype": "float64"},
}  # fmt: skip


def open_ids_only(path: Path, **options: Any) -> TorchModel:
    model = load_torch(path, **options)
    vars(model)["tokenizer"] = IdsOnly()
    return model


def answers(model: TorchModel, ids: np.ndarray) -> list[list[int]]:
    """Continue three prompts alone, and all in a batch that is narrowed on its way."""
    prompts, most = [ids[:n].tolist() for n in (3, 20, 9)], [30, 8, 16]
    made = [[t.id for t in model.generate(p, max_tokens=n)] for p, n in zip(prompts, most, strict=True)]
    batch: list[list[int]] = [[], [], []]
    for at, token in model.generate_batch(prompts, max_tokens=most):
        batch[at].append(token.id)
    return made + batch


def require_close(path: Path, *, max_error: float, **options: Any) -> TorchModel:
    reference, model = (
        open_ids_only(path, dtype="float64", residency=options.get("residency", "auto")),
        open_ids_only(path, **options),
    )
    ids = IDS % reference.config.vocab_size
    expected = reference.forward(ids)
    assert np.linalg.norm(model.forward(ids) - expected) < max_error * np.linalg.norm(expected)
    assert answers(model, ids) == answers(reference, ids)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_folder(request.param, tmp_path_factory.mktemp("families"), 3)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_model_generates_the_tokens_of_float64(folder: Path, way: str):
    require_close(folder, device="cuda", max_error=1e-13 if way == "float64" else 1e-5, **WAYS[way])


@pytest.mark.slow_cases(but=["qwen3_moe-Q4_0-own", "qwen3_moe-Q8_0-torch"])
@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["own", "torch"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_packed_experts_generate_the_tokens_of_float64(family: str, kind: str, kernels: str, tmp_path: Path):
    folder = random_folder(family, tmp_path / "hf", 3, **EVEN)
    path = convert(folder, tmp_path / "packed.gguf", ggml_type=GGMLType[kind]).target
    decoding = require_close(path, device="cuda", kernels=kernels, residency="packed", max_error=1e-5)._spare
    assert decoding is not None
    assert isinstance(decoding.replay, GraphedSteps) is (kernels == "own")


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["own", "torch"])
@pytest.mark.parametrize("name", [
    "awq-gemm", "bnb-nf4", "ct-fp8-dynamic", "ct-nvfp4", "ct-w8a8", "gptq-4bit", "gptq-4bit-act-order", "gptq-8bit",
    "mlx-4bit", "mlx-4bit-experts", "mlx-8bit", "mlx-mxfp8",
])  # fmt: skip
def test_quantised_folders_generate_the_tokens_of_float64(name: str, kernels: str):
    decoding = require_close(FOLDERS / name, device="cuda", kernels=kernels, residency="packed", max_error=1e-5)._spare
    assert decoding is not None
    assert isinstance(decoding.replay, GraphedSteps) is (kernels == "own")
