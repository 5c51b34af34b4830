"""The tokens of one job, chosen from logits."""

import math

import numpy as np
import pytest
import torch
from helpers.refusals import assert_tells

from llorch.model.generate import Job, Sampled, log_probability, sample_ids
from llorch.ops.sampling import SamplingSettings
from llorch.pytorch.serving.choosing import Choosing, next_tokens, top_of

CPU = torch.device("cpu")
VOCAB = 50
SETTINGS = [
    SamplingSettings(),
    SamplingSettings(temperature=1.0, seed=4),
    SamplingSettings(presence_penalty=2.0),
    SamplingSettings(temperature=1.3, frequency_penalty=0.9, repetition_penalty=1.3, top_p=0.9, seed=8),
]


class Listed:
    """A guide that allows the same tokens always."""

    def __init__(self, *ids: int) -> None:
        self.ids, self.taken = ids, list[int]()

    def allowed(self) -> np.ndarray:
        return np.isin(np.arange(VOCAB), self.ids)

    def take(self, token_id: int) -> None:
        self.taken.append(token_id)


def choosing(settings: SamplingSettings, **more) -> Choosing:
    return Choosing(Job([1, 2, 3], 30, settings, frozenset(), **more), VOCAB, CPU)


def chosen(one: Choosing, logits: torch.Tensor) -> Sampled:
    (made,) = next_tokens([one], logits.view(1, -1))
    assert isinstance(made, Sampled)
    return made


def rows(n: int) -> torch.Tensor:
    return torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(1)) * 2


@pytest.mark.parametrize("settings", SETTINGS)
def test_tokens_are_those_that_generate_would_choose(settings: SamplingSettings):
    logits = rows(30)
    one, each = choosing(settings), iter(logits.numpy())
    expected = list(sample_ids(lambda new: next(each), [1, 2, 3], settings, max_tokens=30))
    actual = [chosen(one, row) for row in logits]
    assert [sampled.id for sampled in actual] == [token_id for token_id, _ in expected]
    np.testing.assert_allclose([sampled.logprob for sampled in actual], [logprob for _, logprob in expected], rtol=1e-6)


@pytest.mark.parametrize("settings", SETTINGS)
def test_guide_restricts_the_tokens_and_receives_each_sampled_token(settings: SamplingSettings):
    guide = Listed(7, 31)
    one = choosing(settings, guide=guide)
    actual = [chosen(one, row) for row in rows(20)]
    assert guide.taken == [sampled.id for sampled in actual]
    assert {*guide.taken} == {7, 31}
    for sampled, row in zip(actual, rows(20).numpy(), strict=True):
        assert sampled.logprob == pytest.approx(log_probability(row, sampled.id), abs=1e-12)


def test_rows_that_are_chosen_together_are_those_that_are_chosen_alone():
    guides = [None, Listed(3, 4), None, Listed(), Listed(5), None]
    settings = [*SETTINGS, SamplingSettings(), SamplingSettings(temperature=0.5, min_p=0.1, seed=2)]
    every = [choosing(how, guide=guide) for how, guide in zip(settings, guides, strict=True)]
    apart = [choosing(how, guide=guide) for how, guide in zip(settings, guides, strict=True)]
    for _ in range(10):
        logits = rows(6)
        together = next_tokens(every, logits)
        assert isinstance(together[3], ValueError)
        for at in (0, 1, 2, 4, 5):
            one, expected = together[at], chosen(apart[at], logits[at])
            assert isinstance(one, Sampled)
            assert one.id == expected.id
            assert one.logprob == pytest.approx(expected.logprob, abs=1e-12)


def test_a_guide_that_allows_nothing_is_an_error():
    (nothing,) = next_tokens([choosing(SamplingSettings(), guide=Listed())], rows(1))
    assert_tells(str(nothing), where="guide", expected=VOCAB, got="[False")


def test_logits_that_are_not_finite_show_before_the_guide_goes_on():
    guide = Listed(7)
    logits = rows(1).index_fill(1, torch.tensor([3]), math.inf)
    assert math.isnan(chosen(choosing(SamplingSettings(), guide=guide), logits).logprob)
    assert guide.taken == []


def test_the_likeliest_tokens_come_with_log_probabilities_before_any_filter():
    row = torch.full((1, VOCAB), -30.0)
    row[0, [9, 4, 30, 2]] = torch.tensor([1.0, 2.0, 1.0, 1.0])
    top = chosen(choosing(SamplingSettings(presence_penalty=2.0), n_top=3, guide=Listed(40)), row).top
    assert [token_id for token_id, _ in top] == [4, 2, 9]  # of equal ones the lowest ids
    expected = [log_probability(row[0].numpy(), token_id) for token_id in (4, 2, 9)]
    np.testing.assert_allclose([logprob for _, logprob in top], expected, rtol=1e-12)
    assert len(top_of(row[0], VOCAB + 5)) == VOCAB
    assert chosen(choosing(SamplingSettings()), row).top == ()
