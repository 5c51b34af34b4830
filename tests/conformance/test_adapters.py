"""Adapters of experts and hybrids: PEFT on our folder, llama.cpp on our file, merged; gradients against PEFT."""

from pathlib import Path

import numpy as np
import pytest
from builders.families import FAMILIES, labelled, random_folder
from builders.family_adapters import family_adapter, float64_peft, gradients_of
from builders.random_adapters import logits_of

from llorch.families.table import FAMILIES as TABLE
from llorch.files import Weights, open_weights
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import Adapter
from llorch.lora.base import identity_of
from llorch.lora.gguf_format import read_lora_gguf, write_lora_gguf
from llorch.lora.merge import MergedWeights
from llorch.lora.peft_format import read_peft, write_peft
from llorch.training.merge_files import merge
from llorch.training.numpy_step import document_gradients

pytestmark = pytest.mark.live
# Elsewhere it has an epsilon of its own.
READ_BY_LLAMACPP = [name for name in FAMILIES if TABLE[name].llamacpp.reads_epsilon]
IDS = [int(i) for i in np.random.default_rng(5).integers(0, 104, 70)]


@pytest.fixture(params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return random_folder(request.param, tmp_path / "base", 0)


@pytest.fixture
def weights(base: Path) -> Weights:
    return open_weights(base)


@pytest.fixture
def adapter(weights: Weights) -> Adapter:
    return family_adapter(weights.config)


def assert_close_logits(actual: np.ndarray, expected: np.ndarray, limit: float) -> None:
    assert np.abs(actual - expected).max() < limit * expected.std()


@pytest.mark.nightly_cases(but=["qwen3_vl"])
@pytest.mark.parametrize("base", READ_BY_LLAMACPP, indirect=True)
def test_llamacpp_gives_the_logits_of_llorch_and_the_file_round_trips(weights, adapter, tmp_path):
    from llorch.engines.llamacpp import logits_with_adapter
    from llorch.files.convert import convert

    twin = convert(weights.path, tmp_path / "twin.gguf").target
    write_lora_gguf(adapter, tmp_path / "adapter.gguf", weights.config)
    ours, plain = logits_of(AdaptedWeights(weights, adapter), IDS), logits_of(weights, IDS)
    assert np.abs(ours - plain).max() > ours.std()
    assert_close_logits(logits_with_adapter(twin, tmp_path / "adapter.gguf", IDS), ours, 1e-4)
    again = read_lora_gguf(tmp_path / "adapter.gguf", weights.config)
    assert_close_logits(logits_of(AdaptedWeights(weights, again), IDS), ours, 1e-4)


@pytest.mark.nightly_cases(but=["mistral"])
def test_merged_models_in_memory_and_on_disk_give_the_logits_of_the_adapter(weights, adapter, tmp_path):
    write_peft(adapter, tmp_path / "adapter", base=identity_of(weights))
    wide = weights.astype(np.float64)
    ours = logits_of(AdaptedWeights(wide, adapter), IDS)
    assert_close_logits(logits_of(MergedWeights(wide, adapter), IDS), ours, 1e-11)
    for target in ("folder", "merged.gguf"):
        done = merge(weights.path, tmp_path / "adapter", tmp_path / target)
        written = open_weights(tmp_path / target)
        assert_close_logits(logits_of(written.astype(np.float64), IDS), ours, 1e-4)
        assert done.logits is not None
        assert done.logits.error < 1e-3 * done.logits.spread < done.logits.effect  # of runs in float32
        assert identity_of(written).config == identity_of(weights).config


KINDS = labelled("gradients")
RELATIVE = 1e-12
FACTOR = 4  # times what PEFT is off from itself when its attention adds in another order


def peft_loss_and_gradients(
    base: Path, folder: Path, adapter: Adapter, ids: np.ndarray, attention: str
) -> tuple[float, dict]:
    """Loss and gradients, by our names, of PEFT in float64."""
    import torch

    from llorch.engines.transformers_capture import float64_everywhere

    model, given = float64_peft(base, folder, attention), torch.from_numpy(ids)[None]
    with float64_everywhere(refuse=False):
        loss = torch.nn.functional.cross_entropy(model(input_ids=given).logits[0, :-1], given[0, 1:])
        loss.backward()
    return loss.item(), gradients_of(model, adapter)


@pytest.mark.nightly_cases(but=["qwen2"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_of_every_tensor_equal_peft(kind: str, tmp_path: Path, rng):
    family, own = KINDS[kind]
    base = random_folder(family, tmp_path / "base", 0, **own)
    weights = open_weights(base).astype(np.float64, keep=True)
    adapter = family_adapter(weights.config)
    write_peft(adapter, tmp_path / "adapter", base=identity_of(weights))
    again = read_peft(tmp_path / "adapter", weights.config)
    assert {name: array.tobytes() for name, array in again.flat().items()} == {
        name: array.tobytes() for name, array in adapter.flat().items()
    }
    ids = rng.integers(0, weights.config.vocab_size, 70)
    (expected, gradients), (_, others) = (
        peft_loss_and_gradients(base, tmp_path / "adapter", again, ids, how) for how in ("eager", "sdpa")
    )
    adapted, wanted = AdaptedWeights(weights, again), np.append(ids[1:], -100)
    loss, grads = document_gradients(ids, wanted, adapted, label_smoothing=0.0, n_trained=69)
    assert loss / 69 == pytest.approx(expected, rel=RELATIVE)
    for name, theirs in gradients.items():
        limit = max(RELATIVE * np.abs(theirs).max(), FACTOR * np.abs(theirs - others[name]).max())
        np.testing.assert_allclose(grads[name], theirs, rtol=0, atol=limit, strict=True, err_msg=name)
