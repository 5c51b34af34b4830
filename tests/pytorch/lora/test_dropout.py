"""Masks of dropout: what they depend on, what they do not, and that they look drawn."""

from math import sqrt
from pathlib import Path

import numpy as np
import pytest
import torch
from builders.random_adapters import random_adapter
from helpers.refusals import refuses
from helpers.training_passes import CPU, base
from helpers.training_runs import losses_on_mesh, run_steps, small_settings
from torch import Tensor

from llorch.ops.cross_entropy import IGNORED
from llorch.pytorch.distributed.launch import on_ranks
from llorch.pytorch.lora.adapters import attach, trainable_parameters
from llorch.pytorch.lora.dropout import DropoutModule, drop_mask, keyed, only, salt_of, token_keys
from llorch.pytorch.train.adamw import AdamW
from llorch.pytorch.train.forward import checkpoint_gradients
from llorch.pytorch.train.step import Alone, Stepper
from llorch.training.batch import Batch, Example
from llorch.training.data import batches

SHARE = 0.3
SALT = salt_of("layers.0.q_proj")
MASK64 = 2**64 - 1


def drop_bits(
    samples: list[int], n_slots: int = 64, *, width: int = 512, seed: int = 5, step: int = 7, salt: int = SALT
) -> Tensor:
    """Of a batch, (batch, seq, width)."""
    return drop_mask(token_keys(np.array(samples), n_slots, seed=seed, step=step), SHARE, salt=salt, width=width)


def correlation(first: Tensor, second: Tensor) -> float:
    """In standard deviations of what independent masks have."""
    a, b = (each.flatten().double() - (1 - SHARE) for each in (first, second))
    return abs(float((a * b).mean())) / (SHARE * (1 - SHARE)) * sqrt(a.numel())


def splitmix64(x: int) -> int:
    """Splitmix64 in whole numbers of Python."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK64
    return x ^ x >> 31


def expected_bits(key: int, salt: int, feature: int) -> int:
    """Of a feature, in whole numbers of Python."""
    both, mask32 = splitmix64(key ^ salt & MASK64), 2**32 - 1
    h = (both + feature * 0x9E3779B9) & mask32
    h = ((h ^ h >> 16) * 0x85EBCA6B) & mask32 ^ both >> 32
    h = ((h ^ h >> 13) * 0xC2B2AE35) & mask32
    return h - 2**32 if h >= 2**31 else h


def test_splitmix64_equals_the_published_values():
    assert [splitmix64(n * 0x9E3779B97F4A7C15 & MASK64) for n in range(3)] == [
        0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F,
    ]  # fmt: skip


@pytest.mark.parametrize(("seed", "step", "sample"), [(0, 0, 0), (2**63 - 1, 10**6, 10**12)])
def test_mask_equals_the_formulas(seed: int, step: int, sample: int):
    actual = drop_bits([sample], 3, width=5, seed=seed, step=step)[0]
    for slot in range(3):
        key = splitmix64(splitmix64(splitmix64(splitmix64(seed) ^ step) ^ sample) ^ slot)
        expected = [expected_bits(key, SALT, feature) >= round(SHARE * 2**32) - 2**31 for feature in range(5)]
        assert actual[slot].tolist() == expected


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.9, 1 - 2**-40])
def test_dropout_share_holds_overall_per_token_and_per_feature(share: float):
    kept = drop_mask(token_keys(np.arange(8), 64, seed=0, step=0), share, salt=SALT, width=512).flatten(0, 1).double()
    for axis in ((0, 1), 0, 1):
        means, n = kept.mean(axis), kept.numel() / kept.mean(axis).numel()
        assert float((means - (1 - share)).abs().max()) <= 5 * sqrt(share * (1 - share) / n) + 1e-9


def test_masks_of_other_seeds_steps_samples_and_modules_are_independent():
    this = drop_bits([3])
    others = {
        "seed": drop_bits([3], seed=6), "step": drop_bits([3], step=8), "sample": drop_bits([4]),
        "next slot": drop_bits([3]).roll(1, 1),
        "leaf": drop_bits([3], salt=salt_of("layers.0.k_proj")), "next feature": drop_bits([3]).roll(1, 2),
        "step and sample": drop_bits([7], step=3), "near features": drop_bits([3]).roll(3, 2),
        "one bit of the leaf": drop_bits([3], salt=SALT ^ 1),
    }  # fmt: skip
    for what, other in others.items():
        assert correlation(this, other) < 4.5, what
    assert correlation(this, drop_bits([3])) > 100  # or nothing would be told


def test_mask_bits_at_corners_of_a_rectangle_are_independent():
    signs = drop_bits([0, 1, 2, 3]).flatten(0, 1).double() - (1 - SHARE)
    for rows, columns in ((1, 1), (64, 1), (64, 256), (1, 64)):
        corners = signs * signs.roll(rows, 0) * signs.roll(columns, 1) * signs.roll((rows, columns), (0, 1))
        assert abs(float(corners.mean())) / (SHARE * (1 - SHARE)) ** 2 * sqrt(corners.numel()) < 4.5


def test_mask_of_a_row_does_not_depend_on_padding_or_batch():
    alone = drop_bits([11], 9)[0]
    assert torch.equal(drop_bits([4, 11, 2], 30)[1, :9], alone)
    assert torch.equal(drop_bits([11, 12], 9)[0], alone)


def test_mask_of_some_columns_equals_columns_of_the_full_mask():
    keys, every = token_keys(np.arange(2), 5, seed=5, step=7), drop_bits([0, 1], 5)
    for first, width in ((0, 512), (128, 256), (511, 1)):
        some = drop_mask(keys, SHARE, salt=SALT, width=width, first=first)
        assert torch.equal(some, every[..., first : first + width])


def test_mask_does_not_depend_on_tile_size(monkeypatch: pytest.MonkeyPatch):
    whole = drop_bits([0, 1], 9)
    monkeypatch.setattr("llorch.pytorch.lora.dropout._TILE_CPU", 5 * 512)
    assert torch.equal(drop_bits([0, 1], 9), whole)


@pytest.mark.gpu
def test_masks_on_a_gpu_equal_those_on_the_cpu():
    keys = token_keys(np.arange(3), 50, seed=5, step=7)
    made = drop_mask(keys.cuda(), SHARE, salt=SALT, width=513, first=7)
    assert torch.equal(made.cpu(), drop_mask(keys, SHARE, salt=SALT, width=513, first=7))


def test_dropout_module_without_token_keys_does_not_train():
    module, x = base("micro-qwen2"), torch.ones(2, 4, 96)
    attach(module, random_adapter(module.config, target_modules=("q_proj",), lora_dropout=0.5), trainable=True)
    lora_module = module.get_submodule("model.layers.0.self_attn.q_proj")
    lora_module(x)
    module.train()
    with refuses(
        ValueError, where="dropout", expected="(2, 4)", got=("none", "llorch.pytorch.lora.dropout.keyed(...)")
    ):
        lora_module(x)
    with keyed(module, token_keys(np.arange(2), 5, seed=0, step=0)):
        with refuses(ValueError, where="dropout", expected="(2, 4)", got="(2, 5)"):
            lora_module(x)
    with refuses(ValueError, got="none"):
        lora_module(x)


def test_dropout_mask_of_some_tokens_equals_rows_of_the_full_mask():
    lora_module, x, tokens = DropoutModule(), torch.ones(2, 4, 96), torch.tensor([1, 3, 6])
    with keyed(torch.nn.ModuleList([lora_module, torch.nn.Linear(1, 1)]), token_keys(np.arange(2), 4, seed=0, step=0)):
        every = lora_module.mask_of(x, 0.5, salt=SALT)
        with only(lora_module, tokens):
            some = lora_module.mask_of(x.flatten(0, 1)[tokens], 0.5, salt=SALT)
        assert torch.equal(lora_module.mask_of(x, 0.5, salt=SALT), every)
    assert torch.equal(some, every.flatten(0, 1)[tokens])


def ragged_batches(batch_size: int, order: list[int]) -> list[Batch]:
    """Four rows of several lengths, in batches."""
    lengths, rng = (9, 17, 5, 12), np.random.default_rng(0)
    ids = [tuple(rng.integers(0, 300, length).tolist()) for length in lengths]
    rows = [(Example(one, (IGNORED, IGNORED, *one[2:])),) for one in ids]
    return list(batches([rows[i] for i in order], batch_size, samples=np.array(order)))


def gradients(
    batches: list[Batch], *, chunk: int | None = None, recomputed: bool = False, dora: bool = False
) -> dict[str, Tensor]:
    """Of a step with dropout, in float64, everything adapted."""
    module = base("micro-qwen2", torch.float64)
    targets = ("q_proj", "v_proj", "down_proj", "lm_head", "embed_tokens")
    adapter = random_adapter(module.config, target_modules=targets, lora_dropout=SHARE, use_dora=dora)
    attach(module, adapter, trainable=True)
    if recomputed:
        checkpoint_gradients(module)
    parameters = trainable_parameters(module)
    optimizer = AdamW(parameters, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, lr_ratio=1.0, eight_bit=False)
    worker, how = Alone(module), {"label_smoothing": 0.0, "chunk": chunk, "max_norm": 1.0, "seed": 1}
    Stepper(worker, optimizer, CPU, **how).backward(batches, number=2)
    return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}


@pytest.mark.nightly_cases("False")
@pytest.mark.parametrize("dora", [False, True])
def test_step_does_not_depend_on_row_layout(dora: bool):
    expected = gradients(ragged_batches(4, [0, 1, 2, 3]), dora=dora)
    layouts = {
        "2 x 2": {"batches": ragged_batches(2, [0, 1, 2, 3])}, "1 x 4": {"batches": ragged_batches(1, [2, 0, 3, 1])},
        "in chunks": {"batches": ragged_batches(2, [3, 0, 1, 2]), "chunk": 5},
        "run again": {"batches": ragged_batches(4, [0, 1, 2, 3]), "recomputed": True},
    }  # fmt: skip
    for what, how in layouts.items():
        found = gradients(**how, dora=dora)
        assert len(found) == len(expected) > 20
        for name, grad in found.items():
            error = float((grad - expected[name]).abs().max() / expected[name].abs().max())
            assert error < 1e-13, (what, name)
            assert error == 0 or what != "run again", name


@pytest.mark.nightly_cases("rows")
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}], ids=["rows", "matrices"])
def test_dropout_on_several_ranks_equals_dropout_in_one_process(tmp_path: Path, axes: dict[str, int]):
    settings = small_settings(
        tmp_path, model="micro-qwen2", dtype="float64", dropout=SHARE, init="pissa", target_modules="all-linear",
        lr=1e-2, batch_size=3,
    )  # fmt: skip
    alone = run_steps(settings, steps=0)
    expected = [alone.run_step().loss for _ in range(3)]
    assert on_ranks(2, losses_on_mesh, settings, axes, 3) == pytest.approx(expected, rel=1e-12)
