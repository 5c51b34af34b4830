"""The memory of a training step, estimated before the first one, against counts by hand.

`benchmarks/train_estimate.py` measures whole runs.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training_runs import small_settings, trained

from llorch.files import open_weights
from llorch.lora.initial import initial_adapter
from llorch.pytorch.device import target
from llorch.pytorch.lora.adapters import attach
from llorch.pytorch.train.loading import load_for_training
from llorch.pytorch.train.memory import kept_bytes, step_memory
from llorch.runtime.builtin import builtin_path
from llorch.training.settings import TrainSettings

CPU = torch.device("cpu")


def kept(settings: TrainSettings) -> tuple[float, float]:
    weights = open_weights(builtin_path(settings.model))
    module = load_for_training(weights, target("cpu", "float32"), residency="decoded", batch=1, n_tokens=9)
    attach(module, initial_adapter(settings.lora, weights, init="default", seed=0), trainable=True)
    return kept_bytes(module, CPU)


@pytest.mark.parametrize("model", ["micro-llama", "micro-qwen2"])
def test_what_a_token_keeps_is_what_the_formulas_of_a_block_keep(tmp_path: Path, model: str):
    """Norms keep their input, attention q, k, v and its result, SwiGLU three arrays, adapters their input and A x."""
    config = open_weights(builtin_path(model)).config
    hidden, inter, r = config.hidden_size, config.intermediate_size, 6
    block = 2 * hidden + 3 * inter + 2 * config.q_width + 2 * config.kv_width + 2 * hidden + inter + 7 * r
    found, once = kept(small_settings(tmp_path, model=model, target_modules="all-linear", r=r))
    assert once < found
    assert found == pytest.approx(4 * block * config.n_layers, rel=0.15)


def test_an_adapter_behind_the_blocks_keeps_nothing_of_them(tmp_path: Path):
    assert kept(small_settings(tmp_path, target_modules=("lm_head",))) == (0, 0)


def test_dora_keeps_matrices_and_dropout_what_it_made(tmp_path: Path):
    plain, dora, dropout = (kept(small_settings(tmp_path, **more)) for more in ({}, {"dora": True}, {"dropout": 0.1}))
    assert dora[1] > plain[1] + 4 * open_weights(builtin_path("micro-qwen3")).config.hidden_size ** 2
    assert dropout[0] > plain[0]


def estimate(**changes: Any) -> tuple[int, int, int]:
    config = open_weights(builtin_path("micro-llama")).config
    values: dict[str, Any] = {"n_tokens": 100, "width": 4, "chunk": 10, "recomputed": False, "trained": 7} | changes
    found = step_memory(config, (1e6, 8.0), device=CPU, **values)
    assert found.peak == found.now + found.trained + found.activations + found.logits
    return found.trained, found.activations, found.logits


def test_options_of_a_run_change_the_estimate_as_they_change_the_run():
    config = open_weights(builtin_path("micro-llama")).config
    head = 4 * config.hidden_size * config.vocab_size
    in_hand = 100 * (3 * config.intermediate_size * 4 + 2 * config.hidden_size * 4)
    assert estimate() == (7, 10**8 + 8, max(in_hand, head + 10 * config.vocab_size * 4))
    assert estimate(chunk=0)[2] == head + 3 * 100 * config.vocab_size * 4
    inputs = config.n_layers * config.hidden_size * 4
    assert estimate(recomputed=True)[1] == 100 * inputs + int((10**8 + 8) / config.n_layers)
    assert estimate(n_tokens=200)[1] == 2 * 10**8 + 8


@pytest.mark.parametrize("packing", [False, True])
def test_the_longest_row_of_the_data_decides(tmp_path: Path, packing: bool):
    training = trained(small_settings(tmp_path, batch_size=2, packing=packing), steps=0)
    found = training.memory
    assert found is not None
    longest = training.data.settings.max_length if packing else max(training.data.train.lengths)
    assert found.n_tokens == min(2, len(training.data.rows(training.data.train))) * longest
    n_parameters = sum(parameter.numel() for parameter in training.parameters.values())
    assert found.trained >= 3 * 4 * n_parameters  # gradients and two moments
