"""Many prompts at once: each answer is the one that the prompt gets alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.refusals import refuses

import llorch
from llorch.model.generate import Token
from llorch.ops.sampling import SamplingSettings
from llorch.pytorch.batch import one_each, positions_of
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


def batched(model: llorch.TorchModel, prompts: Sequence = PROMPTS, **how: Any) -> list[list[Token]]:
    answers: list[list[Token]] = [[] for _ in prompts]
    for at, token in model.generate_batch(prompts, **how):
        answers[at].append(token)
    return answers


def alone(model: llorch.TorchModel, at: int, **how: Any) -> list[Token]:
    return list(model.generate(PROMPTS[at], max_tokens=LENGTHS[at], **how))


def assert_same(actual: list[Token], expected: list[Token], *, atol: float) -> None:
    assert [(t.id, t.text, t.finish) for t in actual] == [(t.id, t.text, t.finish) for t in expected]
    np.testing.assert_allclose([t.logprob for t in actual], [t.logprob for t in expected], rtol=0, atol=atol)


@pytest.mark.slow_cases(but=["micro-qwen2-True", "micro-qwen3-False"])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_each_answer_is_that_of_the_prompt_alone(name: str, ignore_eos: bool):
    model = llorch.load_torch(name, dtype="float64")
    for at, answer in enumerate(batched(model, max_tokens=LENGTHS, settings=SETTINGS, ignore_eos=ignore_eos)):
        assert_same(answer, alone(model, at, settings=SETTINGS[at], ignore_eos=ignore_eos), atol=1e-11)


def test_each_answer_in_float32_is_that_of_numpy(name: str):
    numpy, model = llorch.load(name), llorch.load_torch(name)
    for at, answer in enumerate(batched(model, max_tokens=LENGTHS, settings=SETTINGS)):
        assert_same(answer, list(numpy.generate(PROMPTS[at], max_tokens=LENGTHS[at], settings=SETTINGS[at])), atol=2e-5)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [2], [1, 0], [0, 0, 0, 1]])
def test_a_reproducible_answer_is_the_same_to_the_last_bit_in_any_company(order: list[int]):
    model = llorch.load_torch("micro-qwen3", mode="reproducible")
    prompts, lengths, settings = ([of_each[at] for at in order] for of_each in (PROMPTS, LENGTHS, SETTINGS))
    answers = batched(model, prompts, max_tokens=lengths, settings=settings)
    for at, answer in zip(order, answers, strict=True):
        assert answer == alone(model, at, settings=SETTINGS[at])


def test_tokens_come_as_they_are_made():
    model = llorch.load_torch("story")
    order = [at for at, _ in model.generate_batch(["The", "Once upon"], max_tokens=3, ignore_eos=True)]
    assert order == [0, 1, 0, 1, 0, 1]


def test_what_a_penalty_counts_goes_with_its_sequence_when_others_leave():
    model = llorch.load_torch("micro-llama", dtype="float64")
    settings = SamplingSettings(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.9)
    lengths = [2, 15, 2, 2, 9]  # then those that are left stand in other rows, twice
    answers = batched(model, max_tokens=lengths, settings=settings, ignore_eos=True)
    for prompt, n, answer in zip(PROMPTS, lengths, answers, strict=True):
        assert_same(answer, list(model.generate(prompt, max_tokens=n, settings=settings, ignore_eos=True)), atol=1e-11)


def test_infinity_that_an_earlier_batch_left_behind_is_no_nan():
    model = llorch.load_torch("micro-llama")
    first = batched(model, max_tokens=4, ignore_eos=True)
    assert model._spare is not None
    for store in (*model._spare.cache.keys, *model._spare.cache.values):
        store.fill_(torch.inf)
    assert batched(model, max_tokens=4, ignore_eos=True) == first


def test_sequences_that_ended_leave_the_batch():
    model = llorch.load_torch("micro-llama")
    sizes: list[int] = []
    model.module.register_forward_hook(lambda module, args, out: sizes.append(len(args[0])))
    batched(model, max_tokens=[9, 2, 5, 2, 2], ignore_eos=True)
    assert sizes == [5, 5, 2, 2, 2, 1, 1, 1, 1]  # three of five are done after two tokens, one of two after five


def test_a_batch_reads_long_prompts_in_passes_of_bounded_size(monkeypatch: pytest.MonkeyPatch):
    model = llorch.load_torch("micro-qwen2", dtype="float64")
    prompts = [list(range(1, 30)), [4, 5], list(range(2, 13))]
    whole = batched(model, prompts, max_tokens=4, ignore_eos=True)
    monkeypatch.setitem(CHUNK, "cpu", 15)
    sizes: list[int] = []
    model.module.model.register_forward_hook(lambda module, args, out: sizes.append(args[0].shape[1]))
    in_parts = batched(model, prompts, max_tokens=4, ignore_eos=True)
    assert sizes == [5, 5, 5, 5, 5, 4, 1, 1, 1]
    for actual, expected in zip(in_parts, whole, strict=True):
        assert_same(actual, expected, atol=1e-11)


def test_stop_strings_and_the_end_of_the_context_count_for_each_sequence():
    model = llorch.load_torch("story")
    full = [1] * (model.config.max_position_embeddings - 1)
    one, other = batched(model, [full, "Once upon a time"], max_tokens=40, stop=[" boy"], ignore_eos=True)
    assert (len(one), one[-1].finish) == (2, "length")
    assert other[-1].finish == "stop"
    assert "".join(token.text for token in other) == ", there was a little"


def test_a_prompt_without_tokens_to_make_gets_none():
    model = llorch.load_torch("micro-llama")
    assert [len(answer) for answer in batched(model, ["The", "A fox"], max_tokens=[0, 3], ignore_eos=True)] == [0, 3]
    assert batched(model, []) == []


def test_what_is_wrong_with_a_prompt_names_the_prompt():
    model = llorch.load_torch("micro-llama")
    with refuses(ValueError, where="prompt 1", expected="one token", got="none"):
        batched(model, ["The", []])
    with refuses(ValueError, 100000, "index 1", where="prompt 0"):
        batched(model, [[1, 100000]])


def test_settings_are_one_for_all_or_one_for_each():
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
def test_a_mask_of_transformers_says_the_positions(mask: list[int], positions: list[int], dtype: torch.dtype):
    assert positions_of(torch.tensor([mask], dtype=dtype)).tolist() == [positions]
