"""The cache of the torch path: where tokens stand, and what they see."""

import pytest
import torch
from helpers.refusals import refuses

from llorch.families.config import ModelConfig
from llorch.pytorch.cache import Cache


def empty(config: ModelConfig, *, batch: int = 2, n_slots: int = 5, first_position: int = 0) -> Cache:
    kind = {"dtype": torch.float32, "device": torch.device("cpu")}
    return Cache(config, batch=batch, n_slots=n_slots, first_position=first_position, **kind)


def new_rows(config: ModelConfig, batch: int, seq: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (2, batch, seq, config.n_kv_heads, config.head_dim)
    k, v = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return k, v


def test_a_token_lies_in_the_slot_of_its_position(config: ModelConfig):
    cache = empty(config)
    place = cache.place(torch.tensor([[0, 1, 2], [2, 3, 4]]), ctx=5)
    k, v = new_rows(config, 2, 3)
    keys, values = cache.append(1, k, v, place)
    assert keys.shape == values.shape == (2, config.n_kv_heads, 5, config.head_dim)
    assert torch.equal(keys[0, :, :3], k[0].transpose(0, 1))
    assert torch.equal(values[1, :, 2:], v[1].transpose(0, 1))
    assert not keys[0, :, 3:].any()
    assert not keys[1, :, :2].any()
    assert not cache.keys[0].any()  # the other layers are as they were
    assert not cache.values[2].any()


def test_slots_are_counted_from_the_first_position(config: ModelConfig):
    cache = empty(config, batch=1, first_position=30)
    assert cache.place(torch.tensor([[30, 32, -1]]), ctx=5).slots.tolist() == [[0, 2, 5]]


def test_padding_goes_to_a_slot_that_nobody_sees(config: ModelConfig):
    cache = empty(config, batch=1)
    place = cache.place(torch.tensor([[-1, 0, 1, -1]]), ctx=5)
    assert place.slots.tolist() == [[5, 0, 1, 5]]
    k, v = new_rows(config, 1, 4)
    keys, values = cache.append(0, k, v, place)
    assert torch.equal(keys[0, :, :2], k[0, 1:3].transpose(0, 1))
    assert not keys[:, :, 2:].any()
    assert not values[:, :, 2:].any()


def test_a_token_sees_all_up_to_itself_and_padding_sees_one_slot(config: ModelConfig):
    visible = empty(config, batch=1).place(torch.tensor([[-1, 0, 3]]), ctx=4).visible
    assert visible is not None
    assert visible[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]


def test_no_mask_is_made_where_none_is_needed(config: ModelConfig):
    assert empty(config, batch=1).place(torch.tensor([[0, 1]]), ctx=2, causal=True).visible is None


def test_later_tokens_join_those_that_are_there(config: ModelConfig):
    cache = empty(config)
    first, second = new_rows(config, 2, 2, seed=1), new_rows(config, 2, 1, seed=2)
    cache.append(0, *first, cache.place(torch.tensor([[0, 1], [-1, 0]]), ctx=2))
    keys, values = cache.append(0, *second, cache.place(torch.tensor([[2], [1]]), ctx=3))
    assert torch.equal(keys[0], torch.cat((first[0][0], second[0][0])).transpose(0, 1))
    assert torch.equal(values[1, :, :2], torch.stack((first[1][1, 1], second[1][1, 0])).transpose(0, 1))


def test_storage_stays_where_it_is(config: ModelConfig):
    cache = empty(config)
    before = [tensor.data_ptr() for tensor in (*cache.keys, *cache.values)]
    keys, _ = cache.append(0, *new_rows(config, 2, 2), cache.place(torch.tensor([[0, 1], [0, 1]]), ctx=2))
    assert [tensor.data_ptr() for tensor in (*cache.keys, *cache.values)] == before
    assert keys.data_ptr() == cache.keys[0].data_ptr()


def test_half_precision_keeps_the_angles_in_float32(config: ModelConfig):
    cache = Cache(config, batch=1, n_slots=3, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert cache.keys[0].dtype == torch.bfloat16
    assert cache.place(torch.tensor([[1]]), ctx=3).cos.dtype == torch.float32


@pytest.mark.parametrize(("n_slots", "first_position"), [(0, 0), (41, 0), (5, 36), (1, -1)])
def test_positions_outside_the_context_are_refused(config: ModelConfig, n_slots: int, first_position: int):
    with refuses(ValueError, first_position, first_position + n_slots - 1, 40, where="cache"):
        empty(config, n_slots=n_slots, first_position=first_position)


def test_all_of_the_context_can_be_used(config: ModelConfig):
    assert empty(config, n_slots=40).place(torch.tensor([[39], [-1]]), ctx=40).slots.tolist() == [[39], [40]]
    assert empty(config, n_slots=1, first_position=39).n_slots == 1
