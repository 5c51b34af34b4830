"""Whole models of the hybrid families, written by transformers: beside its float64, and however a text is cut."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.families import HYBRIDS, random_folder
from helpers.refusals import refuses

from llorch.files import Weights, open_weights
from llorch.model.blocks import forward
from llorch.model.cache import KVCache
from llorch.model.generate import IdsOnly
from llorch.model.model import Model
from llorch.runtime.errors import NonFiniteRun

pytestmark = pytest.mark.live  # transformers makes the models

LENGTHS = (70, 1, 200, 2, 3, 4, 63, 64, 65, 129)  # of the text of a seed


def ids_of(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 104, n)


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("seed", [pytest.param(i, marks=[pytest.mark.slow] if i > 2 else []) for i in range(10)])
def test_logits_are_those_of_transformers_in_float64(tmp_path: Path, family: str, seed: int):
    import torch
    import transformers

    from llorch.engines.float64_everywhere import float64_everywhere

    folder, ids = random_folder(family, tmp_path / family, seed), ids_of(seed, LENGTHS[seed])
    with float64_everywhere(), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        expected = model(torch.tensor(ids[None]), use_cache=False).logits[0].numpy()
    weights = open_weights(folder).astype(np.float64)
    actual = forward(ids, weights, KVCache(weights.config, np.float64))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:

    return open_weights(random_folder("qwen3_5", tmp_path_factory.mktemp("hybrid") / "m", 3)).astype(np.float64)


@pytest.mark.parametrize("cuts", [[1], [2], [3], [63], [64, 65], [7, 71, 135], list(range(1, 140))], ids=str)
def test_a_text_in_parts_is_that_text(weights: Weights, cuts: list[int]):
    ids = ids_of(1, 140)
    whole, cache = forward(ids, weights, KVCache(weights.config, np.float64)), KVCache(weights.config, np.float64)
    parts = np.concatenate([forward(part, weights, cache) for part in np.split(ids, cuts)])
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-12 * np.abs(whole).max())


def test_a_prompt_longer_than_a_pass_is_cut_by_the_model(weights: Weights, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.model.model.PREFILL_CHUNK", 50)
    ids, model = ids_of(2, 170), Model(weights)
    whole = forward(ids, weights, KVCache(weights.config, np.float64))
    np.testing.assert_allclose(model.forward(ids), whole, rtol=0, atol=1e-12 * np.abs(whole).max())


@pytest.mark.parametrize("failing", ["embed", "l0.delta_state", "l2.gated_norm", "l3.k_cache", "logits"])
def test_failed_pass_does_not_change_the_cache(weights: Weights, failing: str):
    ids, cache = ids_of(4, 90), KVCache(weights.config, np.float64)
    expected = forward(ids, weights, KVCache(weights.config, np.float64))[60:]
    forward(ids[:60], weights, cache)

    def keep(name: str, array: np.ndarray) -> np.ndarray:
        if name == failing:
            raise KeyboardInterrupt
        return array

    with pytest.raises(KeyboardInterrupt):
        forward(ids[60:], weights, cache, keep=keep)
    np.testing.assert_allclose(forward(ids[60:], weights, cache), expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("weight", "stage"), [("decay", "log_decay"), ("conv", "conv_out"), ("delta_norm", "gated_norm")]
)
def test_what_is_not_finite_is_named_where_it_begins(weights: Weights, weight: str, stage: str):
    class Broken(Weights):
        def __init__(self) -> None:
            vars(self).update(vars(weights))

        def __getitem__(self, name: str) -> Any:
            return weights[name] * (np.nan if name == f"layers.1.{weight}" else 1)

    model = Model(Broken())
    vars(model)["tokenizer"] = IdsOnly()
    with refuses(NonFiniteRun, f"l1.{stage}"):
        list(model.generate(ids_of(0, 70).tolist(), max_tokens=2, ignore_eos=True))
