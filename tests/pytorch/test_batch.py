"""Many prompts at once: each answer is the one that the prompt gets alone; where tokens stand, and what they see."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.refusals import refuses

import llorch
from llorch.families.config import ModelConfig
from llorch.model.generate import Token
from llorch.ops.sampling import SamplingSettings
from llorch.pytorch.batch import one_each, positions_of
from llorch.pytorch.cache import Cache
from llorch.pytorch.decoding import left_padded
from llorch.pytorch.memory import CHUNK
from llorch.runtime.builtin import BUILTIN

PROMPTS = ["The", "Once upon a time there was a small red", "A fox", "x", "Once upon a time"]
LENGTHS = [11, 3, 9, 5, 1]
SETTINGS = [
    SamplingSettings(),
    SamplingSettings(temperature=1.0, seed=5),
    SamplingSettings(temperature=0.8, top_k=9, top_p=0.9, seed=6),
    SamplingSettings(repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingSettings(temperature=1.2, min_p=0.05, repetition_penalty=1.1, presence_penalty=-0.5, seed=7),
]


@pytest.fixture(scope="module", params=BUILTIN)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def generate_batched(model: llorch.TorchModel, prompts: Sequence = PROMPTS, **options: Any) -> list[list[Token]]:
    answers: list[list[Token]] = [[] for _ in prompts]
    for at, token in model.generate_batch(prompts, **options):
        answers[at].append(token)
    return answers


def generate_alone(model: llorch.TorchModel, index: int, **options: Any) -> list[Token]:
    return list(model.generate(PROMPTS[index], max_tokens=LENGTHS[index], **options))


def assert_same(actual: list[Token], expected: list[Token], *, atol: float) -> None:
    assert [(t.id, t.text, t.finish) for t in actual] == [(t.id, t.text, t.finish) for t in expected]
    np.testing.assert_allclose([t.logprob for t in actual], [t.logprob for t in expected], rtol=0, atol=atol)


@pytest.mark.slow_cases(but=["micro-qwen2-True", "micro-qwen3-False"])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_each_answer_equals_the_prompt_alone(name: str, ignore_eos: bool):
    model = llorch.load_torch(name, dtype="float64")
    for at, answer in enumerate(generate_batched(model, max_tokens=LENGTHS, settings=SETTINGS, ignore_eos=ignore_eos)):
        assert_same(answer, generate_alone(model, at, settings=SETTINGS[at], ignore_eos=ignore_eos), atol=1e-11)


def test_each_float32_answer_equals_numpy(name: str):
    numpy, model = llorch.load(name), llorch.load_torch(name)
    for at, answer in enumerate(generate_batched(model, max_tokens=LENGTHS, settings=SETTINGS)):
        assert_same(answer, list(numpy.generate(PROMPTS[at], max_tokens=LENGTHS[at], settings=SETTINGS[at])), atol=2e-5)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [2], [1, 0], [0, 0, 0, 1]])
def test_reproducible_answer_has_the_same_bits_in_any_batch(order: list[int]):
    model = llorch.load_torch("micro-qwen3", mode="reproducible")
    prompts, lengths, settings = ([of_each[at] for at in order] for of_each in (PROMPTS, LENGTHS, SETTINGS))
    for at, answer in zip(order, generate_batched(model, prompts, max_tokens=lengths, settings=settings), strict=True):
        assert answer == generate_alone(model, at, settings=SETTINGS[at])


def test_tokens_are_yielded_as_they_are_generated():
    model = llorch.load_torch("story")
    order = [at for at, _ in model.generate_batch(["The", "Once upon"], max_tokens=3, ignore_eos=True)]
    assert order == [0, 1, 0, 1, 0, 1]


def test_penalty_counts_stay_with_their_sequence_when_others_leave():
    model = llorch.load_torch("micro-llama", dtype="float64")
    settings = SamplingSettings(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.9)
    lengths = [2, 15, 2, 2, 9]  # then those that are left stand in other rows, twice
    answers = generate_batched(model, max_tokens=lengths, settings=settings, ignore_eos=True)
    for prompt, n, answer in zip(PROMPTS, lengths, answers, strict=True):
        assert_same(answer, list(model.generate(prompt, max_tokens=n, settings=settings, ignore_eos=True)), atol=1e-11)


def test_infinity_of_an_earlier_batch_causes_no_nan():
    model = llorch.load_torch("micro-llama")
    first = generate_batched(model, max_tokens=4, ignore_eos=True)
    assert model._spare is not None
    for store in (*model._spare.cache.keys, *model._spare.cache.values):
        store.fill_(torch.inf)
    assert generate_batched(model, max_tokens=4, ignore_eos=True) == first


def test_sequences_that_ended_leave_the_batch():
    model = llorch.load_torch("micro-llama")
    sizes: list[int] = []
    model.module.register_forward_hook(lambda module, args, out: sizes.append(len(args[0])))
    generate_batched(model, max_tokens=[9, 2, 5, 2, 2], ignore_eos=True)
    assert sizes == [5, 5, 2, 2, 2, 1, 1, 1, 1]  # three of five are done after two tokens, one of two after five


def test_a_batch_reads_long_prompts_in_passes_of_bounded_size(monkeypatch: pytest.MonkeyPatch):
    model = llorch.load_torch("micro-qwen2", dtype="float64")
    prompts = [list(range(1, 30)), [4, 5], list(range(2, 13))]
    whole = generate_batched(model, prompts, max_tokens=4, ignore_eos=True)
    monkeypatch.setitem(CHUNK, "cpu", 15)
    sizes: list[int] = []
    model.module.model.register_forward_hook(lambda module, args, out: sizes.append(args[0].shape[1]))
    in_parts = generate_batched(model, prompts, max_tokens=4, ignore_eos=True)
    assert sizes == [5, 5, 5, 5, 5, 4, 1, 1, 1]
    for actual, expected in zip(in_parts, whole, strict=True):
        assert_same(actual, expected, atol=1e-11)


def test_stop_strings_and_the_end_of_the_context_count_for_each_sequence():
    model = llorch.load_torch("story")
    full = [1] * (model.config.max_position_embeddings - 1)
    one, other = generate_batched(model, [full, "Once upon a time"], max_tokens=40, stop=[" boy"], ignore_eos=True)
    assert (len(one), one[-1].finish) == (2, "length")
    assert other[-1].finish == "stop"
    assert "".join(token.text for token in other) == ", there was a little"


def test_a_prompt_without_tokens_to_make_gets_none():
    model = llorch.load_torch("micro-llama")
    assert [
        len(answer) for answer in generate_batched(model, ["The", "A fox"], max_tokens=[0, 3], ignore_eos=True)
    ] == [0, 3]
    assert generate_batched(model, []) == []


def test_error_of_a_prompt_names_the_prompt():
    model = llorch.load_torch("micro-llama")
    with refuses(ValueError, where="prompt 1", expected="one token", got="none"):
        generate_batched(model, ["The", []])
    with refuses(ValueError, 100000, "index 1", where="prompt 0"):
        generate_batched(model, [[1, 100000]])


def test_settings_are_shared_or_one_per_prompt():
    assert one_each(3, 2, name="n") == [3, 3]
    assert one_each([3, 4], 2, name="n") == [3, 4]
    with refuses(ValueError, expected=("max_tokens", 3), got=2):
        one_each([1, 2], 3, name="max_tokens")


def test_prompts_end_in_the_last_column():
    ids, positions = left_padded([[7, 8, 9], [5]])
    np.testing.assert_array_equal(ids, [[7, 8, 9], [0, 0, 5]])
    np.testing.assert_array_equal(positions, [[0, 1, 2], [-1, -1, 0]])


@pytest.mark.parametrize(
    ("mask", "positions"),
    [
        ([1, 1, 1, 1], [0, 1, 2, 3]),
        ([0, 0, 1, 1], [-1, -1, 0, 1]),
        ([1, 1, 0, 0], [0, 1, -1, -1]),
        ([0, 1, 0, 1], [-1, 0, -1, 1]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_attention_mask_of_transformers_gives_the_positions(mask: list[int], positions: list[int], dtype: torch.dtype):
    assert positions_of(torch.tensor([mask], dtype=dtype)).tolist() == [positions]


def empty_cache(config: ModelConfig, *, batch: int = 2, n_slots: int = 5, first_position: int = 0) -> Cache:
    kind = {"dtype": torch.float32, "device": torch.device("cpu")}
    return Cache(config, batch=batch, n_slots=n_slots, first_position=first_position, **kind)


def new_rows(config: ModelConfig, batch: int, seq: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (2, batch, seq, config.n_kv_heads, config.head_dim)
    k, v = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return k, v


def test_a_token_lies_in_the_slot_of_its_position(config: ModelConfig):
    cache = empty_cache(config)
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
    cache = empty_cache(config, batch=1, first_position=30)
    assert cache.place(torch.tensor([[30, 32, -1]]), ctx=5).slots.tolist() == [[0, 2, 5]]


def test_padding_goes_to_a_masked_slot(config: ModelConfig):
    cache = empty_cache(config, batch=1)
    place = cache.place(torch.tensor([[-1, 0, 1, -1]]), ctx=5)
    assert place.slots.tolist() == [[5, 0, 1, 5]]
    k, v = new_rows(config, 1, 4)
    keys, values = cache.append(0, k, v, place)
    assert torch.equal(keys[0, :, :2], k[0, 1:3].transpose(0, 1))
    assert not keys[:, :, 2:].any()
    assert not values[:, :, 2:].any()


def test_token_attends_up_to_itself_and_padding_attends_to_one_slot(config: ModelConfig):
    visible = empty_cache(config, batch=1).place(torch.tensor([[-1, 0, 3]]), ctx=4).visible
    assert visible is not None
    assert visible[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]


def test_no_mask_is_made_where_none_is_needed(config: ModelConfig):
    assert empty_cache(config, batch=1).place(torch.tensor([[0, 1]]), ctx=2, causal=True).visible is None


def test_later_tokens_are_appended(config: ModelConfig):
    cache = empty_cache(config)
    first, second = new_rows(config, 2, 2, seed=1), new_rows(config, 2, 1, seed=2)
    cache.append(0, *first, cache.place(torch.tensor([[0, 1], [-1, 0]]), ctx=2))
    keys, values = cache.append(0, *second, cache.place(torch.tensor([[2], [1]]), ctx=3))
    assert torch.equal(keys[0], torch.cat((first[0][0], second[0][0])).transpose(0, 1))
    assert torch.equal(values[1, :, :2], torch.stack((first[1][1, 1], second[1][1, 0])).transpose(0, 1))


def test_storage_address_is_constant(config: ModelConfig):
    cache = empty_cache(config)
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
        empty_cache(config, n_slots=n_slots, first_position=first_position)


def test_all_of_the_context_can_be_used(config: ModelConfig):
    assert empty_cache(config, n_slots=40).place(torch.tensor([[39], [-1]]), ctx=40).slots.tolist() == [[39], [40]]
    assert empty_cache(config, n_slots=1, first_position=39).n_slots == 1
