"""The page of the torch path: the same numbers as NumPy's float64, whatever the batch, the padding and the cache."""

from pathlib import Path

import numpy as np
import pytest
import torch
from builders.tiny_models import random_tensors, write_folder
from helpers.refusals import refuses

from llorch.files import open_weights
from llorch.model.model import Model
from llorch.pytorch.batch import positions_of
from llorch.pytorch.cache import Cache
from llorch.pytorch.causal_lm import CausalLM, rms_norm, swiglu
from llorch.pytorch.load import load_dense
from llorch.pytorch.model import TorchModel, load_torch
from llorch.pytorch.models.families import build
from llorch.runtime.builtin import BUILTIN, EVERY, builtin_path, installed_models
from llorch.stages.table import keys

IDS = (5, 26, 17, 33, 2, 19, 14, 38, 30)
CPU = torch.device("cpu")
ROPES: dict[str, dict[str, object]] = {
    "none": {},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
}  # fmt: skip


def load_float64(path: Path | str) -> TorchModel:
    """In float64 with the reference implementation's own modules."""
    return load_torch(path, dtype="float64", attention="eager")


@pytest.fixture(scope="module", params=BUILTIN)
def model(request: pytest.FixtureRequest) -> TorchModel:
    return load_float64(request.param)


def reference(model: TorchModel) -> Model:
    return Model(model.weights.astype(np.float64))


def assert_close(actual: np.ndarray, expected: np.ndarray, *, atol: float = 1e-13, name: str = "") -> None:
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(actual), finite, err_msg=name)
    scale = np.abs(expected[finite]).max()
    np.testing.assert_allclose(actual[finite], expected[finite], rtol=0, atol=atol * scale, strict=True, err_msg=name)


def run(model: TorchModel, ids: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    """Logits of every token and of the padding."""
    cache = model.new_cache(len(ids), int(mask.sum(1).max()))
    return model.module(ids, cache.place(positions_of(mask), ctx=cache.n_slots), cache).numpy()


@pytest.mark.parametrize("far", [False, True])
def test_every_stage_in_float64_equals_numpy(model: TorchModel, far: bool):
    first_position = model.config.max_position_embeddings - len(IDS) if far else 0
    actual: dict[str, np.ndarray] = {}
    expected: dict[str, np.ndarray] = {}
    model.forward(IDS, trace=actual, first_position=first_position)
    reference(model).forward(IDS, trace=expected, first_position=first_position)
    assert list(actual) == list(expected) == [key for key, _, _ in keys(model.config)]
    for key, array in expected.items():
        assert_close(actual[key], array, name=key)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("scaling", ROPES)
def test_every_family_with_every_rope_scaling_equals_numpy_in_float64(tmp_path: Path, family: str, scaling: str):
    model = load_float64(write_folder(tmp_path / "model", random_tensors(family), family, **ROPES[scaling]))
    assert_close(model.forward(IDS, first_position=50), reference(model).forward(IDS, first_position=50))


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_batched_padded_sequence_gets_the_logits_it_gets_alone(model: TorchModel, side: str):
    lengths, width = (4, len(IDS), 1), len(IDS) + (side == "both")
    ids, mask = torch.full((3, width), 7), torch.zeros(3, width, dtype=torch.int64)
    for row, n in enumerate(lengths):
        start = {"left": width - n, "right": 0, "both": (width - n) // 2}[side]
        ids[row, start : start + n] = torch.tensor(IDS[-n:])
        mask[row, start : start + n] = 1
    logits = run(model, ids, mask)
    assert np.isfinite(logits).all()  # of the padding, too: its NaN would reach sums over the batch
    for row, n in enumerate(lengths):
        assert_close(logits[row, mask[row] == 1], model.forward(IDS[-n:]), name=f"row {row}")


def test_padding_ids_change_no_bit(model: TorchModel):
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    ids = torch.tensor([[1, 2, 9, 8, 7], [3, 4, 5, 6, 7]])
    other = ids.clone()
    other[0, :2] = torch.tensor([30, 31])
    np.testing.assert_array_equal(run(model, ids, mask)[mask == 1], run(model, other, mask)[mask == 1])


@pytest.mark.parametrize("splits", [(1,), (4,), (8,), (2, 3, 7), tuple(range(1, len(IDS)))])
def test_prefill_in_parts_equals_one_pass(model: TorchModel, splits: tuple[int, ...]):
    whole = model.forward(IDS)
    cache, ids = model.new_cache(1, len(IDS)), torch.tensor([IDS])
    rows = []
    for start, stop in zip((0, *splits), (*splits, len(IDS)), strict=True):
        place = cache.place(torch.arange(start, stop)[None], ctx=stop, causal=True)
        rows.append(model.module(ids[:, start:stop], place, cache)[0].numpy())
    assert_close(np.concatenate(rows), whole)


def test_unfilled_slots_change_nothing(model: TorchModel):
    cache = model.new_cache(1, 50)
    logits = model.module(torch.tensor([IDS]), cache.place(torch.arange(len(IDS))[None], ctx=50), cache)
    assert_close(logits[0].numpy(), model.forward(IDS))


def test_a_second_run_in_a_used_cache_gives_the_same_bits(model: TorchModel):
    cache, positions = model.new_cache(1, len(IDS)), torch.arange(len(IDS))[None]
    runs = []
    for ids in (IDS, IDS[::-1], IDS):
        runs.append(model.module(torch.tensor([ids]), cache.place(positions, ctx=len(IDS)), cache))
    assert torch.equal(runs[0], runs[2])
    assert not torch.equal(runs[0], runs[1])


def test_requested_row_of_each_sequence_is_returned(model: TorchModel):
    ids, positions = torch.tensor([IDS, IDS[::-1]]), torch.arange(len(IDS)).expand(2, -1)
    cache = model.new_cache(2, len(IDS))
    place = cache.place(positions, ctx=len(IDS), causal=True)
    all_rows = model.module(ids, place, cache)
    wanted = model.module(ids, place, cache, rows=torch.tensor([3, 8]))
    assert_close(wanted.numpy(), all_rows[[0, 1], [3, 8]][:, None].numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_in_its_dtype_with_scores_in_float32(dtype: torch.dtype):
    weights = open_weights(builtin_path("micro-qwen3"))
    module, seen = load_dense(weights, dtype=dtype, device=CPU), {}
    cache = Cache(weights.config, batch=1, n_slots=len(IDS), dtype=dtype, device=CPU)

    def keep(name: str, array: torch.Tensor) -> torch.Tensor:
        seen[name.rpartition(".")[2]] = array.dtype
        return array

    module(torch.tensor([IDS]), cache.place(torch.arange(len(IDS))[None], ctx=len(IDS)), cache, keep=keep)
    assert seen.pop("attn_scores") == seen.pop("attn_probs") == torch.float32
    assert set(seen.values()) == {dtype}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_and_swiglu_are_rounded_once(dtype: torch.dtype):
    x, y = torch.randn(2, 64, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide, gain = x.double(), 1 + y[0]
    norm = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain.double()
    for actual, exact in ((rms_norm(x, gain, eps=1e-5), norm), (swiglu(x, y), wide / (1 + (-wide).exp()) * y.double())):
        assert actual.dtype is dtype
        step = torch.finfo(dtype).eps * 2 ** exact.abs().log2().floor()
        off = (actual.double() - exact).abs() / step.clamp(min=torch.finfo(dtype).tiny * torch.finfo(dtype).eps)
        assert off.max() <= 0.501  # half a step, and the float32 under it


def test_array_returned_by_keep_is_used_from_there_on():
    model = load_float64("micro-llama")
    cache = model.new_cache(1, 3)
    place = cache.place(torch.arange(3)[None], ctx=3)

    def keep(name: str, array: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(array) if name == "final_norm" else array

    assert not model.module(torch.tensor([[1, 2, 3]]), place, cache, keep=keep).any()


@pytest.mark.nightly_cases(but=["qwen3"])
@pytest.mark.live
@pytest.mark.parametrize("family", ["llama", "llama tied", "qwen2", "qwen3"])
def test_weight_paths_are_those_of_transformers(tmp_path: Path, family: str):
    from transformers import AutoModelForCausalLM

    family, _, tied = family.partition(" ")
    tensors = random_tensors(family)
    if tied:
        del tensors["lm_head.weight"]
    folder = write_folder(tmp_path / "model", tensors, family, tie_word_embeddings=bool(tied))
    ours, theirs = load_float64(folder).module.state_dict(), AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[path].float(), theirs[path]) for path in ours)


@pytest.mark.parametrize("name", installed_models(EVERY))
def test_causal_lm_alone_of_a_built_in_model_has_the_right_modules_or_is_refused(name: str):
    config = open_weights(builtin_path(name)).config
    with torch.device("meta"):
        if name in BUILTIN:
            assert repr(CausalLM(config)) == repr(build(config))
            return
        with refuses(ValueError, "llorch.load_torch", "llorch.pytorch.models.families.build", config.family):
            CausalLM(config)
