"""Models with experts and delta nets on torch: beside NumPy's pages, in passes, in batches, in every mode."""

from pathlib import Path

import numpy as np
import pytest
import torch
from builders.families import FAMILIES, random_folder

from llorch.families.table import FAMILIES as TABLE
from llorch.files import Weights, open_weights
from llorch.model.blocks import forward
from llorch.model.cache import KVCache
from llorch.model.generate import IdsOnly
from llorch.pytorch.batch_invariant.reproducible import make_reproducible
from llorch.pytorch.cache import Cache
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.decoding import recordable
from llorch.pytorch.load import load_dense
from llorch.pytorch.memory import predict
from llorch.pytorch.model import TorchModel, load_torch
from llorch.pytorch.models.experts import mixed

pytestmark = pytest.mark.live  # transformers makes the models

IDS = np.arange(70) * 7 % 104
CPU = torch.device("cpu")
PARTS = (1, 33, 3, 33)
TWO = pytest.mark.parametrize("folder", ["qwen2_moe", "qwen3_5_moe"], indirect=True)


@pytest.fixture(scope="module", params=[name for name in FAMILIES if TABLE[name].router or TABLE[name].delta_net])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_folder(request.param, tmp_path_factory.mktemp("families"), 3)


@pytest.fixture(scope="module")
def reference(folder: Path) -> np.ndarray:
    weights = open_weights(folder).astype(np.float64)
    return forward(IDS, weights, KVCache(weights.config, np.float64))


def open_ids_only(folder: Path, **options: str) -> TorchModel:
    model = load_torch(folder, **options)  # pyright: ignore[reportArgumentType]
    vars(model)["tokenizer"] = IdsOnly()
    return model


@torch.inference_mode()
def run(module: CausalLM, parts: tuple[int, ...] = (70,), *, padded: bool = False) -> torch.Tensor:
    """Logits of `IDS` in some passes, alone, or below another sequence with padding anywhere in both."""
    dtype, made, done, rows = module.model.norm.weight.dtype, [], 0, 2 if padded else 1
    cache = Cache(module.config, batch=rows, n_slots=75, dtype=dtype, device=CPU)
    rng = np.random.default_rng(0)
    for n in parts:
        width = n + 4 if padded else n
        own = np.sort(rng.permutation(width)[:n])
        ids, positions = rng.integers(0, 104, (rows, width)), np.full((rows, width), -1)
        ids[-1, own], positions[-1, own] = IDS[done : done + n], np.arange(done, done + n)
        if padded:
            positions[0, 1 : n + 1] = np.arange(done, done + n)
        done += n
        place = cache.place(torch.from_numpy(positions), ctx=done, causal=not padded)
        made.append(module(torch.from_numpy(ids), place, cache)[-1, own])
    return torch.cat(made)


def relative_error(actual: np.ndarray | torch.Tensor, expected: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(actual) - expected) / np.linalg.norm(expected))


@pytest.mark.nightly_cases(but=["qwen3_5-parts1-False-page"])
@pytest.mark.parametrize("fixed", [False, True], ids=["page", "reproducible"])
@pytest.mark.parametrize(("parts", "padded"), [((70,), False), (PARTS, False), (PARTS, True)])
def test_float64_logits_equal_numpy(folder, reference, parts, padded, fixed):
    module = load_dense(open_weights(folder), dtype=torch.float64, device=CPU)
    if fixed:
        make_reproducible(module)
    assert relative_error(run(module, parts, padded=padded), reference) < 1e-13


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_float32_logits_are_close_with_each_kernel_setting(folder, reference, kernels):
    model = open_ids_only(folder, kernels=kernels)
    assert relative_error(model.forward(IDS), reference) < 1e-5
    assert relative_error(run(model.module, PARTS), reference) < 1e-5


def test_predicted_memory_counts_states_and_slots(folder):
    model = open_ids_only(folder)
    need = predict(model.weights, model.target, "decoded", 1, 256)
    assert sum(tensor.nbytes for tensor in model.new_cache(1, 256).tensors) <= need.cache
    assert sum(p.nbytes for p in model.module.parameters()) <= need.weights


@TWO
def test_column_major_weights_are_loaded_row_major(folder, reference, monkeypatch):
    read = Weights.read
    monkeypatch.setattr(Weights, "read", lambda *args: np.asfortranarray(read(*args)))  # as reordering leaves them
    assert relative_error(run(open_ids_only(folder).module, PARTS), reference) < 1e-5


@TWO
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reproducible_bits_do_not_depend_on_batch_or_splits(folder, dtype):
    module = load_dense(open_weights(folder), dtype=dtype, device=CPU)
    make_reproducible(module)
    alone = run(module)
    assert torch.equal(run(module, PARTS), alone)
    assert torch.equal(run(module, PARTS, padded=True), alone)


@TWO
def test_batched_answers_equal_prompts_alone(folder):
    model = open_ids_only(folder, mode="reproducible")
    prompts, most = [IDS[:n].tolist() for n in (3, 20, 9)], [12, 2, 6]  # the batch is narrowed on its way
    alone = [[t.id for t in model.generate(p, max_tokens=n)] for p, n in zip(prompts, most, strict=True)]
    again = [t.id for t in model.generate(prompts[0], max_tokens=most[0])]  # in storage that was used
    made = [[], [], []]
    for at, token in model.generate_batch(prompts, max_tokens=most):
        made[at].append(token.id)
    assert made == alone
    assert again == alone[0]


@TWO
def test_steps_with_data_dependent_experts_are_not_recorded(folder):
    assert recordable(open_ids_only(folder).module)
    assert not recordable(open_ids_only(folder, mode="reproducible").module)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_expert_outputs_are_summed_in_float32(dtype: torch.dtype):
    made, weights = torch.randn(1, 5, 8, 32).to(dtype), torch.rand(1, 5, 8).softmax(-1).to(dtype)
    expected = (weights.double()[..., None] * made.double()).sum(2)
    actual = mixed(made, weights)
    assert actual.dtype is torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)
