"""Windows, chunks, layers without RoPE, temperature and Llama 4's rotation on torch, in every way that it runs."""

import numpy as np
import pytest
import torch
from builders.by_position import COMMON, FAMILIES, ModelConfig, logits_of, random_model

from llorch.families.layers import Layer
from llorch.model.blocks.llama4 import head_norm
from llorch.ops.rope import rope_adjacent, rope_tables
from llorch.pytorch.batch_invariant.fixed_order import FixedHeadNorm
from llorch.pytorch.batch_invariant.reproducible import make_reproducible
from llorch.pytorch.cache import Cache
from llorch.pytorch.kernels.sdpa import use_sdpa
from llorch.pytorch.kernels.table import install_kernels, kernels_for
from llorch.pytorch.models.families import build
from llorch.pytorch.models.positions import HeadNorm
from llorch.pytorch.models.positions import rope_adjacent as rope_adjacent_on_torch

pytestmark = pytest.mark.live  # transformers makes the models

IDS = np.arange(40) * 7 % 104


@pytest.fixture(params=FAMILIES)
def model_pair(request):
    model, weights = random_model(request.param)
    ours = build(weights.config).double()
    ours.load_state_dict(model.state_dict())
    return model, ours.eval()


def keep_unchanged(module):
    pass


def install_fastest_kernels(module):
    use_sdpa(module)
    install_kernels(module.float(), kernels_for(torch.device("cpu"), torch.float32, required=False))


@torch.no_grad()
def run(module, parts=(40,), first=0, padding=0):
    """Logits of `IDS` in some passes, alone, or in a batch behind another sequence, with padding before it."""
    rows, dtype, made, done = 2 if padding else 1, next(module.parameters()).dtype, [], 0
    cache = Cache(module.config, batch=rows, n_slots=40, dtype=dtype, device=torch.device("cpu"), first_position=first)
    for n in parts:
        ids, positions = np.zeros((rows, n + padding), int), np.full((rows, n + padding), -1)
        ids[-1, padding:], positions[-1, padding:] = IDS[done : done + n], first + np.arange(done, done + n)
        ids[0, :n], positions[0, :n] = (
            (IDS[::-1] if padding else IDS)[done : done + n],
            first + np.arange(done, done + n),
        )
        done += n
        place = cache.place(torch.from_numpy(positions), ctx=done, causal=not padding)
        made.append(module(torch.from_numpy(ids), place, cache)[-1, padding:])
    return torch.cat(made).numpy()


@pytest.mark.parametrize("prepare", [keep_unchanged, use_sdpa, make_reproducible])
@pytest.mark.parametrize(
    "run_options", [{}, {"parts": (13, 1, 26)}, {"first": 301}, {"parts": (9, 1, 30), "padding": 3}], ids=str
)
def test_every_family_equals_transformers(model_pair, prepare, run_options):
    model, ours = model_pair
    expected = logits_of(model, IDS, run_options.get("first", 0))
    prepare(ours)
    np.testing.assert_allclose(run(ours, **run_options), expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize("parts", [(40,), (30, *(1,) * 10)])
def test_fastest_kernels_do_not_change_unsupported_modules(model_pair, parts):
    model, ours = model_pair
    expected = logits_of(model, IDS)
    install_fastest_kernels(ours)
    np.testing.assert_allclose(run(ours, parts), expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_reproducible_bits_do_not_depend_on_batch_or_splits(model_pair):
    ours = model_pair[1].float()
    make_reproducible(ours)
    np.testing.assert_array_equal(run(ours, (9, 1, 30), padding=3), run(ours))


def test_chunked_attention_mask_equals_numpy():
    config = ModelConfig(**COMMON | {"n_layers": 1, "layers": (Layer(chunk=8),)})
    cache = Cache(config, batch=1, n_slots=20, dtype=torch.float32, device=torch.device("cpu"), first_position=13)
    positions = np.arange(13, 33)
    place = cache.place(torch.from_numpy(positions)[None], ctx=20, causal=True)
    shown, slots = place.near["chunk", 8], np.arange(20)
    first = Layer(chunk=8).seen_from(positions) - 13  # pyright: ignore
    np.testing.assert_array_equal(shown[0, 0], (slots >= first[:, None]) & (slots <= slots[:, None]))  # pyright: ignore
    assert cache.place(torch.tensor([[13, 14]]), ctx=2, causal=True).near["chunk", 8] is None  # of one chunk


def test_llama4_rotation_and_norm_equal_numpy(rng):
    x = rng.normal(size=(1, 5, 6, 10))
    tables = rope_tables(np.arange(5), head_dim=10, theta=1e4, scaling=None)
    actual = rope_adjacent_on_torch(torch.from_numpy(x), *(torch.from_numpy(table)[None] for table in tables))
    np.testing.assert_allclose(actual[0], rope_adjacent(x[0], *tables), atol=1e-15)
    for norm in (HeadNorm(1e-5), FixedHeadNorm(1e-5)):
        np.testing.assert_allclose(norm(torch.from_numpy(x))[0], head_norm(x[0], eps=1e-5), rtol=1e-14)
